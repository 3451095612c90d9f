"""Copy parameters and buffers from one rank to all, and check that all ranks have the same parameters."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.device import array_namespace, download
from mpiddp.device.packing import packed, views
from mpiddp.distributed import MismatchError, ProcessGroup, broadcast
from mpiddp.distributed.objects import gathered
from mpiddp.typing import Array

from .buckets import ParameterLike


def _difference(group: ProcessGroup, call: str, told: dict[str, str]) -> str:
    """Return the first name for which a rank tells another text than the first rank, with both; "" if all agree.

    The ranks exchange checksums of the texts, and the texts themselves only if the checksums differ. Each of these
    exchanges is an operation with the name ``call``, so it is an error if another rank makes another call.
    """
    if len(set(gathered(group, call, zlib.crc32(repr(told).encode())))) == 1:
        return ""
    everybody = gathered(group, call, told)
    first = everybody[0]
    for rank, theirs in zip(group.ranks, everybody, strict=True):
        for name in first | theirs:
            one, other = first.get(name, "missing"), theirs.get(name, "missing")
            if one != other:
                return f"{name} is {one} on rank {group.ranks[0]} and {other} on rank {rank}"
    return ""


def check_same_model(
    named_parameters: Sequence[tuple[str, ParameterLike]], options: dict[str, Any], group: ProcessGroup
) -> None:
    """Raise RuntimeError on every rank, with the first difference, if ranks differ in options or parameters.

    The names, shapes and dtypes of parameters are compared, and whether they require a gradient. DDP's buckets depend
    on these properties.
    """
    told = {name: repr(value) for name, value in options.items()}
    for index, (name, parameter) in enumerate(named_parameters):
        frozen = "" if parameter.requires_grad else " with requires_grad=False"
        told[f"params[{index}]"] = f"{name} of {parameter.dtype} {tuple(parameter.shape)}{frozen}"
    difference = _difference(group, "DistributedDataParallel", told)
    if difference:
        raise RuntimeError(f"DDP expects same model across all ranks, and the same options, but {difference}")


def broadcast_arrays(arrays: Sequence[Array], group: ProcessGroup, source: int = 0) -> None:
    """Copy the arrays of the group's rank ``source`` to all ranks, in one message for the host and one for GPUs."""
    for xp in dict.fromkeys(map(array_namespace, arrays)):
        # Arrays with the longest elements come first, so that each part of the message is aligned for its dtype. GPU
        # kernels need that.
        together = sorted((x for x in arrays if array_namespace(x) is xp), key=lambda x: -x.itemsize)
        flat = packed([x.ravel().view(np.uint8) for x in together])
        broadcast(flat, group=group, group_src=source)
        if group.rank() != source:
            for x, part in zip(together, views(flat, [(x.nbytes,) for x in together]), strict=True):
                x[...] = part.view(x.dtype).reshape(x.shape)


def check_equal_values(named_arrays: Sequence[tuple[str, Array]], group: ProcessGroup) -> None:
    """Raise MismatchError on every rank if an array has other bits on some rank than on the group's first rank.

    The error names that rank and its first such array.
    """
    told = {}
    for name, x in named_arrays:
        checksum = zlib.crc32(np.ascontiguousarray(download(x)).reshape(-1).view(np.uint8).data)
        told[f"{name} ({x.dtype} {x.shape})"] = f"bits with the checksum {checksum:08x}"
    difference = _difference(group, "check_replicas", told)
    if difference:
        raise MismatchError(
            f"the replicas differ: {difference}; look for updates outside of optimizer.step(), or data-dependent code"
            " that only some ranks run"
        )
