"""Files and folders that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mpiddp.serialization import WRITER, sync_folder, temporary_name


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
        sync_folder(temporary)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync_folder(folder.parent)
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
