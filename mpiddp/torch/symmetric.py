"""Tensors in symmetric memory."""

from __future__ import annotations

import math

import torch

from mpiddp import distributed
from mpiddp.distributed.groups import GroupLike


def symmetric_empty(
    shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32, group: GroupLike = None
) -> torch.Tensor:
    """Return an uninitialised tensor that the ranks of the node share (`mpiddp.symmetric_empty`); all call alike.

    It is in the host's memory; collectives reduce it, and contiguous views of it, in place.
    """
    sizes = shape if isinstance(shape, tuple) else (shape,)
    memory = distributed.symmetric_empty(math.prod(sizes) * dtype.itemsize, "uint8", group)
    if memory is None:
        raise ValueError("symmetric_empty: this rank is not a member of the group")
    return torch.from_numpy(memory).view(dtype).view(sizes)
