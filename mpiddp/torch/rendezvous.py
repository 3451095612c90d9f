"""The rendezvous of torch's ``init_process_group``: store, rank and number of ranks from MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed.rendezvous import _rendezvous_handlers as handlers

from mpiddp import settings

from .errors import translated

_latest: Any = None


def meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Give torch a store, this process's rank, and the number of ranks; all ranks call."""
    from . import default, store  # slow: `import torch` would wait for it

    global _latest
    told = {name: int(numbers[0]) for name, numbers in parse_qs(urlparse(url).query).items()}
    with translated():
        group = default.begin(timeout, told.get("rank", -1), told.get("world_size", -1))
        _latest = store.Store(timeout)
        _latest.announce()
    yield _latest, group.rank(), group.size()
    raise RuntimeError("ranks of an MPI job do not change: there is no second rendezvous")


def renew() -> None:
    """Let the remaining ranks meet in the store of the first of them; all of them call."""
    if _latest is not None:
        _latest.announce()


def install() -> None:
    """Let ``env://``, torch's default, need no variables under an MPI launcher; ``mpi://`` never needs any."""
    original = handlers["env"]

    def env(url: str, **options: Any) -> Iterator[Any]:
        by_mpi = settings.launch() is not None and "MASTER_ADDR" not in os.environ
        return meet(url, **options) if by_mpi else original(url, **options)

    handlers["mpi"], handlers["env"] = meet, env


def prefer_mpi() -> None:
    """Let ``env://`` ignore MASTER_ADDR, which is there for scripts that read it."""
    handlers["env"] = meet
