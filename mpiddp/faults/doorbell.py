"""The doorbell: a socket of every rank, by which ``python -m mpiddp where`` asks a job for its ranks' activities.

An abstract Unix socket, named by user, job and rank: no file, nothing left behind, reachable from this machine (or
container) only, and silent to other users.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PREFIX = "mpiddp"
_NAMES = Path("/proc/net/unix")
_CREDENTIALS = struct.Struct("3i")
_SEND_S = 2.0
_ANSWER_S = 15.0
"""The asked rank asks all others, and waits for each of them for seconds."""


class Doorbell:
    """The socket of one rank."""

    def __init__(self, job: str, rank: int) -> None:
        self.sockets: list[socket.socket] = []
        """Readable when a caller rings; empty on a system without such sockets."""
        with contextlib.suppress(OSError):
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.setblocking(False)
            found.bind(f"\0{_PREFIX}-{os.getuid()}-{job}-{rank}")
            found.listen()
            self.sockets.append(found)

    def answer(self, text: Callable[[], str]) -> None:
        """Send ``text()`` to a caller of the same user."""
        with contextlib.suppress(OSError):
            caller, _ = self.sockets[0].accept()
            with caller:
                credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0):
                    caller.settimeout(_SEND_S)
                    caller.sendall(text().encode())

    def close(self) -> None:
        """Close the socket."""
        for each in self.sockets:
            each.close()


class Address(NamedTuple):
    """The doorbell of a rank on this machine."""

    job: str
    rank: int
    name: str


def addresses() -> list[Address]:
    """Return the doorbells of this user's jobs on this machine, by job and rank."""
    pattern = re.compile(rf"@({_PREFIX}-{os.getuid()}-(\S+)-(\d+))$", re.MULTILINE)
    found = pattern.findall(_NAMES.read_text()) if _NAMES.exists() else []
    return sorted({Address(job, int(rank), name) for name, job, rank in found})


def ring(address: Address) -> str:
    """Return a rank's answer about its job, or ""."""
    parts = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller, contextlib.suppress(OSError):
        caller.settimeout(_ANSWER_S)
        caller.connect(f"\0{address.name}")
        while part := caller.recv(1 << 16):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")
