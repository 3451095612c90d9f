"""The store that torch wants, found through MPI: no address, no port, no rank.

It is a ``TCPStore`` of torch's on rank 0, at a port that the system chooses and MPI announces. A rank connects to it
when it is first asked for something: mpiddp's own groups never do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed
from torch.distributed import TCPStore
from torch.distributed.rendezvous import _rendezvous_handlers as handlers

import mpiddp
from mpiddp import settings

from . import default
from .errors import translated

_CALLS = (
    *("add", "append", "check", "compare_set", "delete_key", "get", "has_extended_api", "multi_get", "multi_set"),
    *("num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait"),
)


class Store(torch.distributed.Store):
    """A store that all ranks share; made by all of them together.

    Parameters
    ----------
    timeout : timedelta
        How long it waits for a key.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        self._store: TCPStore | None = None
        address: list[Any] = [None]
        if mpiddp.get_rank() == 0:
            self._store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
            address = [(socket.gethostname(), self._store.port)]
        mpiddp.broadcast_object_list(address, src=0)
        self._host, self._port = address[0]

    def connected(self) -> TCPStore:
        """Return the store at rank 0."""
        if self._store is None:
            # A host's own name need not resolve.
            host = "127.0.0.1" if self._host == socket.gethostname() else self._host
            self._store = TCPStore(host, self._port, None, False, self._timeout, wait_for_workers=False)
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let it wait so long for a key."""
        self._timeout = timeout
        if self._store is not None:
            self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long it waits for a key."""
        return self._timeout


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Store, *arguments: Any) -> Any:
        return getattr(self.connected(), name)(*arguments)

    call.__name__ = name
    return call


for _name in _CALLS:  # torch's C++ looks them up in the class
    setattr(Store, _name, _forward(_name))


_kept: list[Store] = []
"""torch's C++ may hold only its half of a store."""


def meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Give torch's ``init_process_group`` a store, this process's rank, and the number of ranks."""
    told = {name: int(numbers[0]) for name, numbers in parse_qs(urlparse(url).query).items()}
    with translated():
        group = default.begin(timeout, told.get("rank", -1), told.get("world_size", -1))
        store = Store(timeout)
    _kept.append(store)
    yield store, group.rank(), group.size()
    raise RuntimeError("ranks of an MPI job do not change: there is no second rendezvous")


def install() -> None:
    """Let ``env://``, torch's default, need no variables under an MPI launcher; ``mpi://`` never needs any."""
    original = handlers["env"]

    def env(url: str, **options: Any) -> Iterator[Any]:
        by_mpi = settings.launch() is not None and "MASTER_ADDR" not in os.environ
        return meet(url, **options) if by_mpi else original(url, **options)

    handlers["mpi"], handlers["env"] = meet, env


def prefer_mpi() -> None:
    """Let ``env://`` take no notice of MASTER_ADDR, which is there for scripts that read it."""
    handlers["env"] = meet
