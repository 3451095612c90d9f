"""Files and folders that are whole or absent, whatever happens while they are written.

Imports the standard library only.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

WRITER = f"{os.getpid()}-{secrets.token_hex(4)}"
"""Who writes: a number of the process alone would come again, since containers count from 1."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file such that, whatever happens on the way, its name shows the old content or the new, never a part.

    Raises
    ------
    OSError
        If it cannot be written, as on a full disk; nothing of it is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make a folder under its `temporary_name`; at the end of the block it gets its own, with all that is in it.

    A folder that has the name already is replaced. A writer that dies in the moment between the two leaves the name
    empty; `put_back` mends that.

    Raises
    ------
    OSError
        If it cannot be written, as on a full disk; nothing of it is left then, as after an exception in the block.
    """
    temporary, replaced = temporary_name(folder), temporary_name(folder, kind="old")
    try:
        temporary.mkdir(parents=True, exist_ok=True)  # others may have put their files there already
        yield temporary
        _sync_folder(temporary)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        _sync_folder(folder.parent)
    finally:
        remove_folders([temporary, replaced])


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders, each in one move: one that is half removed no longer has its name."""
    for folder in folders:
        doomed = folder if is_temporary(folder) else temporary_name(folder)
        if folder.exists():
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def put_back(parent: Path) -> None:
    """Give folders their names back that a writer moved aside before it died, where nothing has the name."""
    for entry in sorted(parent.glob(".*.old")):
        name = entry.with_name(entry.name[1:].rsplit(".", 2)[0])
        if not name.exists():
            entry.rename(name)


def sweep(folder: Path) -> None:
    """Remove what writers that died have left behind in a folder."""
    left = [entry for entry in folder.iterdir() if is_left_behind(entry)]
    remove_folders(entry for entry in left if entry.is_dir())
    for entry in left:
        if not entry.is_dir():
            entry.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Tell whether this is what a writer is at, or one that died has left behind."""
    return path.name.startswith(".") and path.name.endswith((".tmp", ".old"))


def is_left_behind(path: Path) -> bool:
    """Tell whether this is what another writer, which must have died, has left behind."""
    return is_temporary(path) and path.name.rsplit(".", 2)[1] != WRITER


def temporary_name(path: Path, writer: str = WRITER, kind: str = "tmp") -> Path:
    """Return a name beside ``path``, so in the same file system, that no other writer uses."""
    return path.with_name(f".{path.name}.{writer}.{kind}")


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk."""
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # which that of a full disk does not name
        raise


def _sync_folder(folder: Path) -> None:
    """Make names that were created or changed in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
