"""The backend "mpiddp" of torch.distributed: registration, and the making of groups.

torch calls `register` by its entry points: before 2.15 when torch is imported, since then when "mpiddp" is first asked
for. Nothing here starts MPI before ``init_process_group``.
"""

import contextlib
import sys
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d as c10d

from . import rendezvous
from .errors import translated

NAME = "mpiddp"
_FIRST_WITH_BACKENDS = (2, 15)
"""Since this version of torch a Backend can be written in Python."""


def register() -> None:
    """Make "mpiddp" known to ``torch.distributed``."""
    if torch.distributed.is_available() and NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        rendezvous.install()
        with contextlib.suppress(ImportError):  # before torch 2.9, whose own import must not fail
            from torch.distributed import _dist2

            _dist2.register_backend(NAME, _create_another)


def _create(options: Any, _: Any) -> Any:
    """Make the default group, or a group of some ranks, which alone call this."""
    from mpiddp import distributed  # slow: `import torch` would wait for it

    from . import default
    from .process_group import GroupByDevice, ProcessGroup

    by_torch = _group_by_torch()
    with translated():
        if options.global_ranks_in_group:
            ranks = list(options.global_ranks_in_group)
            default.begin_beside(ranks, options.timeout)
            group = distributed.new_group(ranks, options.timeout, use_local_synchronization=True, sort_ranks=False)
            assert isinstance(group, distributed.ProcessGroup), "torch asks members only"
        else:
            group = default.begin(options.timeout, options.group_rank, options.group_size)
    if by_torch is not None:
        return GroupByDevice(group, options.timeout, options.store, by_torch)
    made = ProcessGroup(group, options.timeout, options.store)
    if torch.__version__ >= _FIRST_WITH_BACKENDS:
        from .torch_backend import Backend

        made.own(Backend(group, options.timeout))
    return made


def _group_by_torch() -> torch.distributed.ProcessGroup | None:
    """Return a group of torch's with the backends that are named beside mpiddp, as in "cpu:mpiddp,cuda:nccl".

    Return None if there are none. torch would leave these backends out, because our group is written in Python. It does
    not tell `_create` of them, so they are read from the frame of the caller.
    """
    helper = sys._getframe(2)
    asked = helper.f_locals["backend_config"].get_device_backend_map()
    others = {device: backend for device, backend in asked.items() if backend != NAME}
    if not others:
        return None
    named = {name: helper.f_locals[name] for name in ("backend_options", "timeout", "device_id")}
    place = [helper.f_locals[name] for name in ("group_size", "group_rank", "global_ranks_in_group")]
    name = f"{helper.f_locals['group_name']}:others"
    store = helper.f_locals["store"]
    text = ",".join(f"{device}:{backend}" for device, backend in others.items())
    made = c10d._new_process_group_helper(*place, text, store, group_name=name, pg_tag=name, **named)[0]
    made._set_default_backend(c10d.Backend.backend_type_map[next(iter(others.values()))])
    c10d._world.pg_group_ranks[made] = {}  # as init_process_group and new_group do, and as its end expects
    return made


def _create_another(
    store: torch.distributed.Store, rank: int, size: int, timeout: timedelta, device: torch.device, **_: object
) -> Any:
    """Make a group of all ranks that ``torch.distributed`` does not know (``torch.distributed._dist2``)."""
    from mpiddp import distributed

    from . import default
    from .process_group import ProcessGroup

    with translated():
        default.begin(timeout, rank, size)
        group = distributed.new_group(timeout=timeout)
    assert isinstance(group, distributed.ProcessGroup), "all ranks are members"
    return ProcessGroup(group, timeout, store)
