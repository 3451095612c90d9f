"""The store that torch wants, found through MPI: no address, no port, no rank.

It is a ``TCPStore`` of torch's on rank 0, at a port that the system chooses and MPI announces. A rank connects to it
when it is first asked for something: mpiddp's own groups never do.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import TCPStore

from mpiddp import distributed as mpiddp

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
