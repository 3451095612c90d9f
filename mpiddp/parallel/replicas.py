"""Make parameters and buffers the same on every rank, and check that they are the same."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpiddp.device import array_namespace, download
from mpiddp.device.packing import packed, views
from mpiddp.distributed import MismatchError, ProcessGroup, broadcast
from mpiddp.distributed.objects import gathered
from mpiddp.typing import Array

from .buckets import ParameterLike

_MAKING = "DistributedDataParallel"


def check_same_model(
    named_parameters: Sequence[tuple[str, ParameterLike]], options: dict[str, Any], group: ProcessGroup
) -> None:
    """Raise RuntimeError on every rank, with the first difference, if ranks differ in options or parameters.

    The names, shapes and dtypes of parameters are compared, and whether they require a gradient. DDP's buckets depend
    on these properties.
    """
    mine = [
        (name, tuple(parameter.shape), str(parameter.dtype), bool(parameter.requires_grad))
        for name, parameter in named_parameters
    ]
    fingerprints = gathered(group, _MAKING, zlib.crc32(repr((options, mine)).encode()))
    if len(set(fingerprints)) == 1:
        return
    everybody = gathered(group, _MAKING, (options, mine))
    other = next(rank for rank, found in enumerate(fingerprints) if found != fingerprints[0])
    (first_options, first), (other_options, theirs) = everybody[0], everybody[other]
    ranks = group.ranks
    for name, value in first_options.items():
        if repr(value) != repr(other_options[name]):
            raise RuntimeError(
                f"DDP expects the same options on all ranks, but {name} is {value!r} on rank {ranks[0]} and"
                f" {other_options[name]!r} on rank {ranks[other]}"
            )
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


def _describe(parameter: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, requires_grad = parameter
    return f"{name} of {dtype} {shape}{'' if requires_grad else ' with requires_grad=False'}"


def broadcast_arrays(arrays: Sequence[Array], group: ProcessGroup, source: int = 0) -> None:
    """Copy the arrays of the group's rank ``source`` to all ranks, in one message for the host and one for GPUs."""
    for xp in dict.fromkeys(map(array_namespace, arrays)):
        # Arrays with the longest elements come first, so that each part of the message is aligned for its dtype. GPU
        # kernels need that.
        together = sorted((x for x in arrays if array_namespace(x) is xp), key=lambda x: -x.itemsize)
        flat = packed([x.reshape(-1).view(np.uint8) for x in together])
        broadcast(flat, group=group, group_src=source)
        if group.rank() != source:
            for x, part in zip(together, views(flat, [(x.nbytes,) for x in together]), strict=True):
                x[...] = part.view(x.dtype).reshape(x.shape)


def check_equal_values(named_arrays: Sequence[tuple[str, Array]], group: ProcessGroup) -> None:
    """Raise MismatchError on every rank if an array has other bits on some rank than on the group's first rank.

    The error names that rank and its first such array.
    """
    mine = {
        name: zlib.crc32(np.ascontiguousarray(download(x)).reshape(-1).view(np.uint8).data) for name, x in named_arrays
    }
    everybody = gathered(group, "check_replicas", mine)
    for rank, theirs in enumerate(everybody):
        for name, x in named_arrays:
            if everybody[0].get(name) != theirs.get(name):
                raise MismatchError(
                    f"the replicas differ: {name} ({x.dtype} {x.shape}) on rank {group.ranks[rank]} has other bits than"
                    f" on rank {group.ranks[0]}; look for updates outside of optimizer.step(), or data-dependent code"
                    " that only some ranks run"
                )


class ModuleState:
    """A module's parameters and buffers, without those whose names are ``ignored``.

    Each call looks them up in the module again, because a program may replace them.
    """

    def __init__(self, module: Any, ignored: Iterable[str] | None = None) -> None:
        if ignored is None:
            ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._module, self._ignored = module, frozenset(ignored)

    def _parameter(self, name: str, parameter: Any) -> Any:
        return parameter

    def _buffer(self, buffer: Any) -> Any:
        return buffer

    def parameters(self) -> list[tuple[str, ParameterLike]]:
        named = self._module.named_parameters()
        return [(name, self._parameter(name, each)) for name, each in named if name not in self._ignored]

    def buffers(self) -> dict[str, Array]:
        return {name: self._buffer(each) for name, each in self._module.named_buffers() if name not in self._ignored}

    def arrays(self) -> list[Array]:
        return [parameter.data for _, parameter in self.parameters()] + list(self.buffers().values())
