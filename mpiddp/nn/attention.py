"""The layer of multi-head attention. Imports ``functional``, ``init``, ``linear``, ``module`` and ``parameter``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace
from mpiddp.typing import Array, DTypeLike

from . import functional as F  # noqa: N812 (its customary name)
from . import init
from .linear import Linear
from .module import Module
from .parameter import Parameter


class MultiheadAttention(Module):
    """Attention in several subspaces at once: projections of queries, keys and values, and one of what comes out.

    Parameters
    ----------
    embed_dim : int
        Length E of the vectors.
    num_heads : int
        Subspaces H; divides E.
    dropout : float, default 0
        Probability with which a weight is left out in training.
    bias : bool, default True
        Whether the projections have biases.
    batch_first : bool, default False
        Whether batches come before positions: (N, L, E) instead of (L, N, E).
    dtype : dtype, default float32
        Of the parameters.

    Raises
    ------
    ValueError
        If ``num_heads`` does not divide ``embed_dim``.

    References
    ----------
    A. Vaswani et al., Attention is all you need, NeurIPS 2017. ``torch.nn.MultiheadAttention``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.in_proj_weight = Parameter(np.empty((3 * embed_dim, embed_dim), dtype))
        self.register_parameter("in_proj_bias", Parameter(np.empty(3 * embed_dim, dtype)) if bias else None)
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        init.xavier_uniform_(self.in_proj_weight)
        for vector in (self.in_proj_bias, self.out_proj.bias):
            if vector is not None:
                init.zeros_(vector)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Array | None = None,
        need_weights: bool = True,
        attn_mask: Array | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the queries have gathered, and with which weights.

        Parameters
        ----------
        query : array or Tensor
            Shape (N, L, E) with ``batch_first``, else (L, N, E).
        key, value : array or Tensor
            Likewise with S positions instead of L. The same objects as ``query`` for self-attention, which is then one
            product instead of three.
        key_padding_mask : array, optional
            Shape (N, S): booleans, True where a key is not to be seen, or numbers, which are added to the scores.
        need_weights : bool, default True
            Whether the weights are returned; without them it is faster.
        attn_mask : array, optional
            Shape (L, S) or (N H, L, S), likewise.
        average_attn_weights : bool, default True
            Return the mean of the heads' weights instead of each.
        is_causal : bool, default False
            A position sees those before it and itself; torch wants the mask as well, this layer does not.

        Returns
        -------
        output : Tensor
            Of the shape of ``query``.
        weights : Tensor or None
            Shape (N, L, S), or (N, H, L, S) where they are not averaged.
        """
        q, k, v = (self._split(x) for x in self._projected(query, key, value))  # (N, H, L, E / H)
        dropout = self.dropout if self.training else 0.0
        mask = self._mask(q, k, key_padding_mask, attn_mask, is_causal)
        if not need_weights:
            return self.out_proj(self._join(F.scaled_dot_product_attention(q, k, v, mask, dropout))), None
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
        weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout, dropout > 0)
        return self.out_proj(self._join(weights @ v)), weights.mean(1) if average_attn_weights else weights

    def _projected(self, query: Any, key: Any, value: Any) -> list[Tensor]:
        """Return the projections of queries, keys and values."""
        e, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        if query is key and key is value:
            joined = F.linear(query, weight, bias)
            return [joined[..., i * e : (i + 1) * e] for i in range(3)]
        rows = [slice(i * e, (i + 1) * e) for i in range(3)]
        return [
            F.linear(x, weight[part], None if bias is None else bias[part])
            for x, part in zip((query, key, value), rows, strict=True)
        ]

    def _mask(
        self, q: Tensor, k: Tensor, key_padding_mask: Array | None, attn_mask: Array | None, is_causal: bool
    ) -> Array | None:
        """Return the sum of all masks as numbers that broadcast to (N, H, L, S), or None."""
        n, heads, length, source = *q.shape[:3], k.shape[2]
        masks = []
        if key_padding_mask is not None:
            masks.append(key_padding_mask.reshape(n, 1, 1, source))
        if attn_mask is not None:
            masks.append(attn_mask.reshape(n, heads, length, source) if attn_mask.ndim == 3 else attn_mask)
        elif is_causal:
            masks.append(array_namespace(q.data).asarray(np.triu(np.ones((length, source), dtype=bool), 1)))
        total = None
        for mask in masks:
            hidden = array_namespace(mask).where(mask, -np.inf, 0.0) if mask.dtype == bool else mask
            total = hidden if total is None else total + hidden
        return None if total is None else total.astype(np.float32 if q.dtype.itemsize == 2 else q.dtype)

    def _split(self, x: Tensor) -> Tensor:
        """Return (N, H, L, E / H) of (N, L, E) or (L, N, E)."""
        heads = x.reshape(*x.shape[:2], self.num_heads, self.embed_dim // self.num_heads)
        return heads.permute(0, 2, 1, 3) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _join(self, heads: Tensor) -> Tensor:
        """Undo `_split`."""
        x = heads.permute(0, 2, 1, 3) if self.batch_first else heads.permute(2, 0, 1, 3)
        return x.reshape(*x.shape[:2], self.embed_dim)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
