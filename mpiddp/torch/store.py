"""torch's key-value store. Rank 0 keeps it, and only the ranks of this job can read or write it.

Rank 0 begins to listen when a group of another backend needs the store, or when a rank uses the store; mpiddp's own
groups do not use it. Without a watchdog, which would answer a rank that asks for the address, rank 0 listens from the
start. If all ranks are on one node, rank 0 listens at a Unix socket, else at a port. The ranks learn by MPI the address
and a secret, which is the first message of each connection.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import secrets
import socket
import threading
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import Any

import torch.distributed
from torch.distributed import DistNetworkError, DistStoreError, HashStore

from mpiddp import distributed
from mpiddp.distributed.groups import default_group
from mpiddp.faults import this_job
from mpiddp.faults.liveness import Tag

_CALLS = (
    *("add", "append", "check", "compare_set", "delete_key", "get", "has_extended_api", "list_keys", "multi_get"),
    *("multi_set", "num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait"),
)
_NAMES_IN_CPP = {"deleteKey": "delete_key", "getNumKeys": "num_keys"}
"""The names by which torch's C++, such as a PrefixStore, calls two of the methods. It never calls `list_keys` or the
methods of queues."""
_PATIENCE_S = 30.0
"""Seconds that a new connection may take to send the secret, and that an answer may be late after a call's timeout."""

_kept: list[Store] = []
"""All stores of this process. They are kept alive, because torch's C++ may hold only the C++ object of a store."""
_servers: list[_Server] = []
"""The servers of this process. The index of a server is the number by which ranks ask for its address."""
_addresses: dict[int, _Address] = {}
"""The addresses of rank 0's servers that this rank knows, by the servers' numbers."""

_Address = tuple[str, int, str]
"""The address of a server: a host, a port and the secret; or the name of a Unix socket, 0 and the secret."""


class _Server:
    """The keys and values of a store, on rank 0, and the threads that answer the other ranks' calls."""

    def __init__(self) -> None:
        self._values = HashStore()
        _servers.append(self)

    def apply(self, name: str, arguments: tuple[Any, ...], timeout: timedelta) -> Any:
        if name in ("get", "multi_get", "wait"):
            keys, *limit = arguments
            keys = [keys] if name == "get" else keys
            try:
                self._values.wait(keys, *limit or [timeout])
            except DistStoreError:
                raise DistStoreError(f"wait timeout: no rank has set {keys} in {(limit or [timeout])[0]}") from None
        return None if name == "wait" else getattr(self._values, name)(*arguments)

    @functools.cached_property
    def address(self) -> _Address:
        """The address of this server. The first use of this property makes the server listen at the address."""
        job, host = this_job.current(), socket.gethostname()
        if job is None or any(job.world.nodes):
            several = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if several else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=several)
            port = listener.getsockname()[1]
        else:
            host, port = f"\0mpiddp-store-{secrets.token_hex(8)}", 0
            listener = socket.create_server(host, family=socket.AF_UNIX)
        secret = secrets.token_hex()
        threading.Thread(target=self._listen, args=(listener, secret), daemon=True).start()
        return host, port, secret

    def _listen(self, listener: socket.socket, secret: str) -> None:
        listener.setblocking(True)  # the program may have set a default timeout of sockets
        while True:
            caller, _ = listener.accept()
            caller.setblocking(True)
            threading.Thread(target=self._serve, args=(Connection(caller.detach()), secret), daemon=True).start()

    def _serve(self, caller: Connection, secret: str) -> None:
        with caller, contextlib.suppress(OSError, EOFError):
            first = caller.recv_bytes(len(secret)) if caller.poll(_PATIENCE_S) else b""
            while hmac.compare_digest(first, secret.encode()):
                request = caller.recv()
                try:
                    answer = True, self.apply(*request)
                except Exception as error:
                    answer = False, error
                caller.send(answer)


class Store(torch.distributed.Store):
    """A rank's access to the store that rank 0 keeps. It works once all ranks have called `announce` together."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        _kept.append(self)
        self._timeout = timeout
        self._server: _Server | None = None  # only rank 0 has one
        self._number = -1
        self._connections = threading.local()  # each thread has its own, so that its waits delay no other

    def announce(self, listens: bool) -> None:
        """Make the server on rank 0 if there is none, and tell all ranks its number. All ranks call this together.

        If ``listens`` is True, or if no watchdog can answer a rank that asks for the address, the server listens at
        once. Otherwise it listens when a rank first asks.
        """
        found: list[Any] = [None]
        job = default_group()._monitor.job
        job.liveness.questions[Tag.STORE] = lambda number: _servers[number].address
        if job.world.rank == 0:
            self._server = self._server or _Server()
            listens = listens or bool(this_job.why_unwatched(job))
            found = [(_servers.index(self._server), self._server.address if listens else None)]
        distributed.broadcast_object_list(found, src=0)
        self._number, address = found[0]
        _addresses.pop(self._number, None)
        if address is not None:
            _addresses[self._number] = address
        self._connections = threading.local()

    def clone(self) -> Store:
        made = Store(self._timeout)
        made._server, made._number = self._server, self._number
        return made

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the store on rank 0, and return its result."""
        if self._server is not None:
            return self._server.apply(name, arguments, self._timeout)
        limit = next((each for each in arguments if isinstance(each, timedelta)), self._timeout)
        try:
            connection = self._connection()
            connection.send((name, arguments, self._timeout))
            # torch.distributed.rpc waits for 2**31 ms, which is too long for poll.
            if not connection.poll(min(limit.total_seconds() + _PATIENCE_S, 2e6)):
                raise TimeoutError("no answer")
            succeeded, value = connection.recv()
        except BaseException as error:
            self._connections.found = None  # a late answer would be taken for that of the next call
            if isinstance(error, (OSError, EOFError)):
                raise DistNetworkError(f"rank 0, which keeps the store, cannot be reached: {error!r}") from error
            raise
        if not succeeded:
            raise value
        return value

    def _connection(self) -> Connection:
        found: Connection | None = getattr(self._connections, "found", None)
        if found is None:
            host, port, secret = _ask(self._number, self._timeout)
            if port:  # a host may not be able to resolve its own name
                here = host == socket.gethostname()
                found = Connection(socket.create_connection(("127.0.0.1" if here else host, port), None).detach())
            else:
                found = Client(host)
            self._connections.found = found
            found.send_bytes(secret.encode())
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """The longest wait for a key."""
        return self._timeout


def _ask(number: int, timeout: timedelta) -> _Address:
    """Return the address of the server with this number. If this rank does not know it, rank 0's watchdog tells it."""
    job = this_job.current()
    assert job is not None
    if number not in _addresses:
        job.liveness.question([0], Tag.STORE, number)
        told = job.liveness.heard_from([0], timeout.total_seconds(), Tag.STORE, number)
        if not told:
            raise TimeoutError("its watchdog does not answer")
        _addresses[number] = told[0]
    return _addresses[number]


for _name in (*_CALLS, *_NAMES_IN_CPP):  # torch's C++ looks methods up in the class, not by __getattr__
    setattr(Store, _name, functools.partialmethod(Store.call, _NAMES_IN_CPP.get(_name, _name)))
