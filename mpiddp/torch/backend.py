"""The backend "mpiddp" of torch.distributed: its registration, and the functions by which torch makes groups.

Entry points of the package mpiddp let torch call `register`. Versions of torch before 2.15 call it when torch is
imported, later ones when a program first names "mpiddp". MPI starts at the earliest when a group is made.
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
"""The first version of torch in which a Backend can be written in Python."""


def register() -> None:
    """Make "mpiddp" known to ``torch.distributed``."""
    if torch.distributed.is_available() and NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        rendezvous.install()
        with contextlib.suppress(ImportError):  # torch before 2.9 has no _dist2, and an error would end `import torch`
            from torch.distributed import _dist2

            _dist2.register_backend(NAME, _create_another)


def _create(options: Any, _: Any) -> Any:
    """Make torch's default group, or a group of some ranks. torch calls this on the ranks of the new group only."""
    from mpiddp import distributed  # a slow import, which at the top would delay `import torch`

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
    """Return a torch group with the backends that a program names beside mpiddp, as in "cpu:mpiddp,cuda:nccl".

    Return None if it names no others. torch would leave the other backends out, because mpiddp's process group is
    written in Python. torch does not pass their names to `_create`, so they are read from the frame of its caller.
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
    c10d._world.pg_group_ranks[made] = {}  # init_process_group and new_group set this; its destruction needs it
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
