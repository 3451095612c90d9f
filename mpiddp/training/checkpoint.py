"""Checkpoints: one folder for each saved step. A folder is complete or absent; the newest and the best are kept.

``step-0000000123/`` holds ``arrays.safetensors`` (model and optimizer), ``state.json``, ``rank-00001.safetensors`` for
each rank with arrays of its own (a shard), and ``manifest.json`` with the length and SHA-256 of each file. Ranks write
their shards and exchange the manifest's entries. Then rank 0 writes the rest in the background and renames the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from mpiddp.serialization import encode_arrays, on_host, sync_folder, temporary_name, write_synced
from mpiddp.typing import Array

ARRAYS, STATE, MANIFEST = "arrays.safetensors", "state.json", "manifest.json"
FORMAT = 2
"""The version of the format. A version of mpiddp whose checkpoints an older one cannot read increases this number."""

_STEP = re.compile(r"step-(\d+)")
_SHARD = re.compile(r"rank-(\d+)\.safetensors")
_VISIBLE_S = 60.0
"""How long rank 0 waits to see another rank's file. Network file systems cache for a while that a file is absent."""
_POLL_S = 0.02


class DamagedError(ValueError):
    """A checkpoint is damaged; the text names the file and the damage."""


@dataclass(frozen=True)
class Checkpoint:
    arrays: Mapping[str, Array]
    state: dict[str, Any]
    """JSON values with the key ``step`` (int), and often ``score`` (float or None; a larger score is better)."""
    shards: Mapping[int, Mapping[str, Array]] = field(default_factory=dict)
    """The arrays that single ranks saved, by rank. Only `read_checkpoint` fills this field."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def frozen(self) -> Checkpoint:
        """Return a copy in host memory, which training does not change while it is written."""
        arrays: dict[str, np.ndarray[Any, Any]] = {name: on_host(x, copy=True) for name, x in self.arrays.items()}
        return Checkpoint(arrays, json.loads(json.dumps(self.state)))

    def write(self, folder: Path, shards: Mapping[str, Any] | None = None) -> None:
        """Write the checkpoint as ``folder``, which appears only when all of its files are written.

        ``shards`` holds the manifest entries of the files that ranks have written into the `temporary_name` of
        ``folder``. OSError if a rank could not write its file; its entry then has the key ``fault``.
        """
        with _whole_folder(folder) as pending:
            _await_shards(pending, shards or {})
            contents = {ARRAYS: encode_arrays(self.arrays), STATE: _json_bytes(self.state)}
            for name, content in contents.items():
                write_synced(pending / name, content)
            files = {name: file_entry(content) for name, content in contents.items()} | dict(shards or {})
            write_synced(pending / MANIFEST, _json_bytes({"format": FORMAT, "files": files}))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint, and check the lengths and digests of its files.

    DamagedError if a file is missing or changed; ValueError if the format is unknown, as after a newer mpiddp.
    """
    try:
        manifest = json.loads(_read(folder / MANIFEST))
        written = manifest["format"]
        expected = dict(manifest["files"])
        if not {ARRAYS, STATE} <= set(expected):
            raise ValueError(f"it does not name {ARRAYS} and {STATE}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder / MANIFEST} is damaged ({error})") from error
    if written not in (1, FORMAT):
        raise ValueError(f"{folder} has format {written}, this mpiddp reads {FORMAT}; use the mpiddp that wrote it")
    contents = {name: _read(folder / name) for name in expected}
    for name, content in contents.items():
        if file_entry(content) != expected[name]:
            raise DamagedError(f"{folder / name}: its {len(content)} bytes are not those that were written (SHA-256)")
    shards = {
        int(match[1]): safetensors.numpy.load(contents[name]) for name in expected if (match := _SHARD.fullmatch(name))
    }
    return Checkpoint(safetensors.numpy.load(contents[ARRAYS]), json.loads(contents[STATE]), shards)


class CheckpointStore:
    """Writes the checkpoints of a run in the background, and keeps the ``keep`` newest and the best.

    Only one process, rank 0, uses the store of a folder.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mpiddp-checkpoint")
        self._writing: Future[None] | None = None

    def tidy(self) -> None:
        """Repair what a writer that died has left: restore the name of a replaced folder, remove unfinished ones."""
        _restore_names(self.folder)
        sweep(self.folder)

    def steps(self) -> list[int]:
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # iterdir() raises if the folder cannot be read; glob() would return no entries.
            names = [entry.name for entry in self.folder.iterdir()]
        return sorted(int(step[1]) for step in map(_STEP.fullmatch, names) if step)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def save(self, checkpoint: Checkpoint, shards: Mapping[str, Any] | None = None) -> None:
        """Copy a checkpoint now, and write the copy in the background.

        OSError if the previous checkpoint could not be written.
        """
        self.finish()
        self._writing = self._pool.submit(self._write, checkpoint.frozen(), shards)

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk; OSError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest undamaged checkpoint, or None, and a text about each newer one that is damaged.

        ValueError if a newer version of mpiddp has written one of them.
        """
        _restore_names(self.folder)
        faults: list[str] = []
        for step in reversed(self.steps()):
            try:
                return read_checkpoint(self.path(step)), faults
            except DamagedError as error:
                faults.append(str(error))
        return None, faults

    def _write(self, checkpoint: Checkpoint, shards: Mapping[str, Any] | None) -> None:
        checkpoint.write(self.path(checkpoint.step), shards)
        self._prune(checkpoint.step)

    def _prune(self, last: int) -> None:
        # A checkpoint of a later step than ``last`` is damaged: otherwise this run would have resumed from it. Damaged
        # checkpoints do not count as kept.
        steps = [step for step in self.steps() if step <= last]
        kept = set(steps[-self.keep :])
        scored = {step: score for step in steps if (score := self._score(step)) is not None}
        if scored:
            kept.add(max(scored, key=lambda step: (scored[step], step)))
        remove_folders(self.path(step) for step in steps if step not in kept)
        sweep(self.folder)

    def _score(self, step: int) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return float(json.loads((self.path(step) / STATE).read_bytes())["score"])
        return None


@contextlib.contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder's `temporary_name` to write into, and rename it to ``folder`` at the end.

    An exception in the block removes the temporary folder. If the writer dies between the two renames, ``folder`` does
    not exist until `_restore_names` runs.
    """
    temporary, replaced = temporary_name(folder), temporary_name(folder, kind="old")
    try:
        temporary.mkdir(parents=True, exist_ok=True)  # other ranks may have written their shards
        yield temporary
        sync_folder(temporary)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        remove_folders([temporary, replaced])


def _await_shards(pending: Path, shards: Mapping[str, Any]) -> None:
    deadline_s = time.monotonic() + _VISIBLE_S
    for name, entry in shards.items():
        if "fault" in entry:
            raise OSError(entry["fault"])
        while not (pending / name).exists():
            if time.monotonic() > deadline_s:
                raise OSError(
                    f"{name} of {pending.name} is written, and rank 0 does not see it: --output has to be in a file"
                    " system that all nodes share"
                )
            time.sleep(_POLL_S)


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders. Each is renamed first, so that a partly removed folder never looks like a checkpoint."""
    for folder in folders:
        doomed = folder if _is_temporary(folder) else temporary_name(folder)
        if folder.exists():
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    for entry in filter(_is_temporary, list(folder.glob(".*"))):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith((".tmp", ".old"))


def _restore_names(parent: Path) -> None:
    """Give replaced folders their names back if the writer died before its second rename (see `_whole_folder`)."""
    for entry in sorted(parent.glob(".*.old")):
        name = entry.with_name(entry.name[1:].rsplit(".", 2)[0])
        if not name.exists():
            entry.rename(name)


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def file_entry(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _json_bytes(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
