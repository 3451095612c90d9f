"""The store that torch wants; MPI tells the ranks where it is.

It is a ``TCPStore`` of torch's on rank 0, at a port that the system chooses. A rank connects on first use, which
mpiddp's own groups never make.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import TCPStore

from mpiddp import distributed

_CALLS = (
    *("add", "append", "check", "compare_set", "delete_key", "get", "has_extended_api", "list_keys", "multi_get"),
    *("multi_set", "num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait"),
)
_NAMES_IN_CPP = {"deleteKey": "delete_key", "getNumKeys": "num_keys"}
"""Two calls have other names in a PrefixStore, which never asks for the queues and `list_keys`."""


_kept: list[Store] = []
"""All stores: torch's C++ may hold only its half of one."""


class Store(torch.distributed.Store):
    """A store that all ranks share, once they have called `announce` together."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        _kept.append(self)
        self._timeout = timeout
        self._server: TCPStore | None = None  # on rank 0
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None

    def announce(self) -> None:
        """Make the store at rank 0 if there is none, and tell all ranks its address; all ranks call."""
        address: list[Any] = [None]
        if distributed.get_rank() == 0:
            if self._server is None:
                self._server = TCPStore("127.0.0.1", 0, None, True, self._timeout, wait_for_workers=False)
            address = [(socket.gethostname(), self._server.port)]
        distributed.broadcast_object_list(address, src=0)
        if address[0] != self._address:
            self._address, self._store = address[0], self._server

    def clone(self) -> Store:
        made = Store(self._timeout)
        made._address, made._server, made._store = self._address, self._server, self._server
        return made

    def connected(self) -> TCPStore:
        if self._store is None:
            # A host's own name need not resolve.
            assert self._address is not None, "announced"
            name, port = self._address
            host = "127.0.0.1" if name == socket.gethostname() else name
            self._store = TCPStore(host, port, None, False, self._timeout, wait_for_workers=False)
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._store is not None:
            self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The longest wait for a key."""
        return self._timeout


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Store, *arguments: Any) -> Any:
        return getattr(self.connected(), name)(*arguments)

    call.__name__ = name
    return call


for _name in (*_CALLS, *_NAMES_IN_CPP):  # torch's C++ looks them up in the class
    setattr(Store, _name, _forward(_NAMES_IN_CPP.get(_name, _name)))
