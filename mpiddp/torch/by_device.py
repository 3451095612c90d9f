"""A group with several backends, such as "cpu:mpiddp,cuda:nccl"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from mpiddp import distributed

from .process_group import METHODS, ProcessGroup
from .work import untraced


class GroupByDevice(ProcessGroup):
    """Calls with tensors of the devices of ``others`` go there, all other calls through mpiddp."""

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
    """Return the device of the first tensor, or that of the options of a barrier."""
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
