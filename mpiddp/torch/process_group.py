"""A torch process group that communicates through mpiddp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from mpiddp import distributed

from . import dispatch
from .errors import ArgumentError, translated
from .operations import Operations
from .work import untraced


@untraced
class ProcessGroup(Operations, torch.distributed.ProcessGroup):
    """A group of mpiddp's as one of torch's.

    Since 2.15 torch also takes a Backend (`backend.Backend`), which this group has; but it hides a Backend's Works
    behind objects that can be waited for and not be asked.
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
        """A group of C++, where calls begin that torch's dispatcher is to see (`dispatch`)."""
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
    ) -> ProcessGroup | None:
        """Return a group of these ranks of this one, which all call; None on other ranks."""
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
        """Take the Backend that torch's tools ask for."""
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
"""The calls that communicate."""

for _name in METHODS:
    if hasattr(torch.distributed.ProcessGroup, _name):  # some are newer
        setattr(ProcessGroup, _name, dispatch.entry(_name, getattr(Operations, _name)))
