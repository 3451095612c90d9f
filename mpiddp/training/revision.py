"""Which state of a program has run: its commit in git. Imports the standard library only."""

from __future__ import annotations

import subprocess
from pathlib import Path

_LIMIT_S = 5.0
"""A network file system may make git slow; a run does not wait longer to know its commit."""


def commit_of(path: Path) -> str | None:
    """Return the commit of the repository that has a file or, of a folder, any file in it.

    Parameters
    ----------
    path : Path
        A file or folder.

    Returns
    -------
    str or None
        40 hexadecimal digits, and ``-dirty`` behind them where files differ from the commit; None where git is not
        installed, or does not know the file.
    """
    folder, name = (path, ".") if path.is_dir() else (path.parent, path.name)
    if not _git(folder, "ls-files", "--", name):
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what a git command prints, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
