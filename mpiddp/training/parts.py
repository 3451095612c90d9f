"""Parts of a checkpoint: what one rank alone holds, written by that rank into the folder that rank 0 completes.

The folder has its temporary name until every part is there. A rank that has written its part says so with a receipt,
a small file with the part's length and digest, which rank 0's writer waits for: nobody calls MPI in a thread.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpiddp.serialization import write_atomically, write_synced

_LOOK_S = 0.02
_LIMIT_S = 1800.0
"""In which a rank has to write its part: a program that fails is not kept for ever by one that does not come."""
_GRACE_S = 60.0
"""In which a part has to be seen that its rank has written: network file systems remember what was not there."""


def part_name(rank: int) -> str:
    """Return the name of a rank's file of arrays."""
    return f"rank-{rank:05d}.safetensors"


def _receipt_name(rank: int) -> str:
    return f"rank-{rank:05d}.receipt"


def entry(content: bytes) -> dict[str, Any]:
    """Return what a manifest says of a file."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_part(pending: Path, rank: int, content: bytes) -> None:
    """Write a rank's part, and then its receipt.

    Parameters
    ----------
    pending : Path
        The folder under its temporary name.
    rank : int
        Whose part it is.
    content : bytes
        A safetensors file.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    pending.mkdir(parents=True, exist_ok=True)
    write_synced(pending / part_name(rank), content)
    write_atomically(pending / _receipt_name(rank), json.dumps(entry(content)).encode())


class AwaitedParts:
    """The parts of one checkpoint, as the writer that completes it sees them.

    Parameters
    ----------
    ranks : sequence of int
        Who writes one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._told = threading.Event()
        self._fault: str | None = None

    def tell(self, fault: str | None) -> None:
        """Say that all ranks are done with their parts, or what has kept one from it."""
        self._fault = fault
        self._told.set()

    def receive(self, pending: Path) -> dict[str, dict[str, Any]]:
        """Wait for all parts, and return what a manifest says of them, by their names.

        Raises
        ------
        OSError
            If a part could not be written, or is not seen here although it was.
        """
        given_up_at = time.monotonic() + _LIMIT_S
        missing = list(self._ranks)
        found = {}
        while missing:
            for rank in list(missing):
                receipt = pending / _receipt_name(rank)
                if receipt.exists():
                    found[part_name(rank)] = json.loads(receipt.read_bytes())
                    receipt.unlink()
                    missing.remove(rank)
            if self._fault is not None:
                raise OSError(self._fault)
            if self._told.is_set():
                given_up_at = min(given_up_at, time.monotonic() + _GRACE_S)
            if missing and time.monotonic() > given_up_at:
                if not self._told.is_set():
                    raise OSError(f"the part of rank {missing[0]} did not come in {_LIMIT_S:g} s")
                raise OSError(
                    f"rank {missing[0]} has written its part of {pending.name}, and rank 0 does not see it: --output"
                    " has to be in a file system that all nodes share"
                )
            if missing:
                time.sleep(_LOOK_S)
        return found
