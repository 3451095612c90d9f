"""Every rank's abstract Unix socket, on which ``python -m mpiddp where`` asks the rank for a report.

Such a socket leaves no file. A rank answers only this user and root, on this machine or in this container.
"""

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path

_NAMES = Path("/proc/net/unix")
_CREDENTIALS = struct.Struct("3i")
_SEND_S = 2.0
_ANSWER_S = 15.0
"""Time for an answer. The rank that is asked may wait for the answers of other ranks for seconds."""


class WhereSocket:
    def __init__(self, job: str, rank: int) -> None:
        self.sockets: list[socket.socket] = []
        """This rank's socket; an empty list on a system without abstract sockets."""
        with contextlib.suppress(OSError):
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.setblocking(False)
            found.bind(f"\0{_name(job, rank)}")
            found.listen()
            self.sockets.append(found)

    def answer(self, text: Callable[[], str]) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self.sockets[0].accept()
            with caller:
                if _user(caller) in (os.getuid(), 0):
                    caller.settimeout(_SEND_S)
                    caller.sendall(text().encode())

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _user(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _name(job: str, rank: int | str) -> str:
    return f"mpiddp-{os.getuid()}-{job}-{rank}"


def bound(pattern: str) -> list[tuple[str, ...]]:
    """Return, for each name of an abstract socket on this machine that matches ``pattern``, what its groups match."""
    return re.findall(f"@{pattern}$", _NAMES.read_text() if _NAMES.exists() else "", re.MULTILINE)


def ranks() -> list[tuple[str, int]]:
    """Return the job and the rank of this user's sockets on this machine."""
    return sorted({(job, int(rank)) for job, rank in bound(_name(r"(\S+)", r"(\d+)"))})


def ask(job: str, rank: int) -> str:
    parts = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller, contextlib.suppress(OSError):
        caller.settimeout(_ANSWER_S)
        caller.connect(f"\0{_name(job, rank)}")
        if _user(caller) != os.getuid():
            return ""  # another user may have taken the name
        while part := caller.recv(1 << 16):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")
