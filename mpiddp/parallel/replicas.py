"""Replicas: every rank holds the same model, checked, and made so from the first rank's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from mpiddp.device import array_namespace, download
from mpiddp.distributed import MismatchError, ProcessGroup, all_gather_object, broadcast
from mpiddp.typing import Array

from .bucket import ParameterLike


def check_same_parameters(named_parameters: Sequence[tuple[str, ParameterLike]], group: ProcessGroup) -> None:
    """Raise on every rank, where ranks hold parameters of different names, shapes or dtypes.

    Raises
    ------
    RuntimeError
        Names the first parameter that differs, and both ranks.
    """
    mine = [(name, parameter.shape, str(parameter.dtype)) for name, parameter in named_parameters]
    fingerprints: list[int] = [0] * group.size()
    all_gather_object(fingerprints, zlib.crc32(repr(mine).encode()), group)
    if len(set(fingerprints)) == 1:
        return
    everybody: list[list[tuple[str, tuple[int, ...], str]]] = [[]] * group.size()
    all_gather_object(everybody, mine, group)
    first = everybody[0]
    other = next(rank for rank, found in enumerate(everybody) if found != first)
    theirs, ranks = everybody[other], group.ranks
    if len(first) != len(theirs):
        raise RuntimeError(
            f"DDP expects same model across all ranks, but Rank {ranks[0]} has {len(first)} params, while rank"
            f" {ranks[other]} has inconsistent {len(theirs)} params."
        )
    index = next(index for index, (one, two) in enumerate(zip(first, theirs, strict=True)) if one != two)
    raise RuntimeError(
        f"DDP expects same model across all ranks, but params[{index}] is {_describe(first[index])} on rank {ranks[0]}"
        f" and {_describe(theirs[index])} on rank {ranks[other]}"
    )


def _describe(parameter: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = parameter
    return f"{name} of {dtype} {shape}"


def broadcast_arrays(arrays: Sequence[Array], group: ProcessGroup, source: int = 0) -> None:
    """Copy the arrays of ``source``, a rank of the group, to all ranks: one message each for those of host and GPU."""
    for xp in dict.fromkeys(map(array_namespace, arrays)):
        together = [x for x in arrays if array_namespace(x) is xp]
        packed = xp.concatenate([xp.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in together])
        broadcast(packed, group=group, group_src=source)
        start = 0
        for x in together:
            # In a copy the elements lie where their dtype has to, which kernels of a device insist on.
            x[...] = packed[start : start + x.nbytes].copy().view(x.dtype).reshape(x.shape)
            start += x.nbytes


def check_equal_values(named_arrays: Sequence[tuple[str, Array]], group: ProcessGroup) -> None:
    """Raise on every rank, where replicas have drifted apart.

    Raises
    ------
    MismatchError
        Names the first array that differs and the rank on which it does.
    """
    mine = [zlib.crc32(np.ascontiguousarray(download(x)).reshape(-1).view(np.uint8).data) for _, x in named_arrays]
    everybody: list[list[int]] = [[]] * group.size()
    all_gather_object(everybody, mine, group)
    for rank, theirs in enumerate(everybody):
        for (name, x), one, two in zip(named_arrays, everybody[0], theirs, strict=True):
            if one != two:
                raise MismatchError(
                    f"the replicas differ: {name} ({x.dtype} {x.shape}) on rank {group.ranks[rank]} has other bits than"
                    f" on rank {group.ranks[0]}; look for updates outside of optimizer.step(), or data-dependent code"
                    " that only some ranks run"
                )
