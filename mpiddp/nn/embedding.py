"""The embedding layer. Imports ``functional``, ``init``, ``module`` and ``parameter``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.typing import DTypeLike

from . import functional as F  # noqa: N812 (its customary name)
from . import init
from .module import Module
from .parameter import Parameter


class Embedding(Module):
    """A table of learned vectors, normally distributed at first.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Rows of the table, and their length.
    padding_idx : int, optional
        A row that is 0 and gets no gradient.
    dtype : dtype, default float32
        Of the table.

    References
    ----------
    torch.nn.Embedding.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"Padding_idx must be within num_embeddings, got {padding_idx} for {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.weight = Parameter(np.empty((num_embeddings, embedding_dim), dtype))
        init.normal_(self.weight)
        if padding_idx is not None:
            self.weight.data[padding_idx] = 0

    def forward(self, input: Any) -> Tensor:
        """Return the rows that ``input`` names."""
        return F.embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """Return the sizes."""
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        return text if self.padding_idx is None else f"{text}, padding_idx={self.padding_idx}"
