"""A torch process group that communicates through mpiddp, alone or beside other backends."""

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d as c10d

from mpiddp import distributed

from . import dispatch
from .errors import ArgumentError, translated
from .operations import Operations
from .work import untraced


@untraced
class ProcessGroup(Operations, torch.distributed.ProcessGroup):
    """A process group of torch that communicates through a group of mpiddp.

    With torch 2.15 or later the group also has a Backend (`torch_backend.Backend`). Calls do not go through the
    Backend, because torch hides a Backend's Works behind objects that a program can only wait for.
    """

    def __init__(self, group: distributed.ProcessGroup, timeout: timedelta, store: torch.distributed.Store) -> None:
        super().__init__(group, timeout)
        self._name = self._description = ""
        self._backend: Any = None
        self._store = store

    def get_group_store(self) -> torch.distributed.Store:
        return self._store

    @functools.cached_property
    def twin(self) -> torch.distributed.ProcessGroup:
        """A process group written in C++. `dispatch` makes calls on it that have to pass torch's dispatcher."""
        made = torch.distributed.ProcessGroup(self._store, self.rank(), self.size())
        made._set_group_name(self._name)
        return made

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "ProcessGroup | None":
        """Return a new group of some ``ranks`` of this group; None on other ranks. The ``ranks`` call this together."""
        if not ranks:
            raise ArgumentError(
                "Split ranks cannot be empty. Please provide a non-empty list of ranks to split the group."
            )
        with translated():
            chosen = [self.group.ranks[self.group._checked(rank)] for rank in ranks]
            part = distributed.new_group(
                chosen, timeout or self.timeout, use_local_synchronization=True, sort_ranks=False
            )
        if part is None:
            return None
        assert isinstance(part, distributed.ProcessGroup), "a member"
        made = ProcessGroup(part, timeout or self.timeout, self._store)
        made.setGroupName(group_name or f"{self._name}:split:{list(ranks)}")
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("groups of other jobs cannot join one of MPI: start all ranks in one job")

    def own(self, backend: Any) -> None:
        """Register ``backend`` as the Backend that torch returns for this group's devices."""
        self._backend = backend
        kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self._register_backend(torch.device(device), kind, backend)
        self._set_default_backend(kind)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in ("cpu", "cuda") if each == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend or self


METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter", "alltoall"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
"""The names of the communicating methods that `dispatch.entry` makes."""

for _name in METHODS:
    if hasattr(torch.distributed.ProcessGroup, _name):  # older versions of torch lack some of them
        setattr(ProcessGroup, _name, dispatch.entry(_name, getattr(Operations, _name)))


class GroupByDevice(ProcessGroup):
    """A group with several backends, such as "cpu:mpiddp,cuda:nccl".

    ``others`` is a torch group with the other backends. It gets the calls with tensors on its devices; all other calls
    go through mpiddp.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        timeout: timedelta,
        store: torch.distributed.Store,
        others: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(group, timeout, store)
        self.others = others
        self._elsewhere = {each.type for each in others._device_types}

    def shutdown(self) -> None:
        super().shutdown()
        if self.others in c10d._world.pg_names:
            c10d.destroy_process_group(self.others)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self.others._device_types]

    def _get_backend(self, device: torch.device) -> Any:
        others = self._others_of([device])
        return super()._get_backend(device) if others is None else others._get_backend(device)

    def _others_of(self, arguments: Iterable[Any]) -> torch.distributed.ProcessGroup | None:
        device = _device(arguments)
        return self.others if device is not None and device.type in self._elsewhere else None


def _device(arguments: Iterable[Any]) -> torch.device | None:
    """Return the device of the first tensor, or the device in a barrier's options; None if there is neither."""
    for each in arguments:
        if isinstance(each, list):
            found = _device(each)
        else:
            found = each if isinstance(each, torch.device) else getattr(each, "device", None)
        if found is not None:
            return torch.device(found)
    return None


def _by_device(name: str) -> Callable[..., Any]:
    ours: Callable[..., Any] = getattr(ProcessGroup, name)

    def call(self: GroupByDevice, *args: Any, **named: Any) -> Any:
        others = self._others_of((*args, *named.values()))
        return ours(self, *args, **named) if others is None else getattr(others, name)(*args, **named)

    call.__name__ = name
    return untraced(call)


for _name in (*METHODS, "_start_coalescing", "_end_coalescing", "supports_tensor_alloc", "allocate_tensor"):
    if hasattr(torch.distributed.ProcessGroup, _name):
        setattr(GroupByDevice, _name, _by_device(_name))
