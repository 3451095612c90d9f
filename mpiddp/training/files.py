"""Files and folders that are whole or absent, whatever happens while they are written.

Imports the standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file such that, whatever happens on the way, its name shows the old content or the new, never a part.

    Raises
    ------
    OSError
        If it cannot be written, as on a full disk; nothing of it is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        _write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_whole_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files such that its name never shows a part of them.

    A folder that has the name already is replaced. A writer that dies in the moment between the two leaves the name
    empty; `put_back` mends that.

    Raises
    ------
    OSError
        If it cannot be written, as on a full disk; nothing of it is left then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = _temporary(folder), _temporary(folder, "old")
    try:
        temporary.mkdir()
        for name, content in contents.items():
            _write_synced(temporary / name, content)
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
        doomed = folder if is_temporary(folder) else _temporary(folder)
        if folder.exists():
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def put_back(parent: Path) -> None:
    """Give folders their names back that a writer moved aside before it died, where nothing has the name."""
    for entry in sorted(parent.glob(".*.old")):
        name = entry.with_name(entry.name[1:].rsplit(".", 2)[0])
        if not name.exists():
            entry.rename(name)


def is_temporary(path: Path) -> bool:
    """Tell whether this is what a writer that died has left behind."""
    return path.name.startswith(".") and path.name.endswith((".tmp", ".old"))


def _temporary(path: Path, kind: str = "tmp") -> Path:
    """Return a name beside ``path``, so in the same file system, that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{kind}")


def _write_synced(path: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make names that were created or changed in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
