"""The Backend object that a process group of mpiddp has with torch 2.15 or later. torch's shrink_group calls it."""

from collections.abc import Sequence
from typing import Any

from torch._C import _distributed_c10d as c10d

from mpiddp import distributed

from . import rendezvous
from .errors import translated
from .operations import Operations


class Backend(Operations, c10d.Backend):
    """The calls of a group, and `shrink`, which makes a group without some of the ranks."""

    @property
    def supports_shrinking(self) -> bool:
        """True for the group of all ranks, the only group that `shrink` can shrink."""
        return self.group is distributed.group.WORLD

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> "Backend":
        with translated():
            made = distributed.shrink_group(ranks_to_exclude, shrink_flags=shrink_flags)
            rendezvous.renew()
        return Backend(made, self.timeout)
