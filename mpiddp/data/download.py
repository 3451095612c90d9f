"""``download``: a file from the first of several places that has it, whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from mpiddp.serialization import write_atomically

STALLED_S = 30.0
"""Seconds without a byte after which a place counts as dead."""


def download(name: str, folder: Path, sources: Sequence[str], sha256: str) -> Path:
    """Fetch a file unless it is there, and check what came; it is small enough for memory.

    Parameters
    ----------
    name : str
        Of the file, there and here.
    folder : Path
        Where to put it; made if missing.
    sources : sequence of str
        Addresses that ``name`` is appended to, tried in turn.
    sha256 : str
        Digest of the right content, in hexadecimal.

    Returns
    -------
    Path
        Of the file. It appears under its name when it is whole, so that several may fetch into one folder at once.

    Raises
    ------
    OSError
        If no place gives the right content, or the folder cannot be written to. The text says which file, what each
        place has answered, and what to do without a network.
    """
    path = folder / name
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return path
    answers = []
    for source in sources:
        try:
            with urlopen(source + name, timeout=STALLED_S) as reply:
                content: bytes = reply.read()
        except (OSError, http.client.HTTPException) as error:
            answers.append(f"{source}{name}: {error}")
            continue
        digest = hashlib.sha256(content).hexdigest()
        if digest == sha256:
            write_atomically(path, content)
            return path
        answers.append(f"{source}{name}: it sent {len(content)} bytes of SHA-256 {digest}, not those of the file")
    raise OSError(
        f"cannot fetch {name} ({'; '.join(answers)}). Without a network, fetch it elsewhere and put it into {folder}; "
        f"its SHA-256 is {sha256}"
    )


__all__ = ["download"]
