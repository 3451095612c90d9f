"""Checkpoints: one file for each saved step. A file is complete or absent; the newest and the best are kept.

``step-0000000123.safetensors`` is a file of `mpiddp.save` with the arrays of model and optimizer, the rest of the
state, and a SHA-256 of both. A rank with a state of its own writes it to a shard, such as
``step-0000000123.rank-00001.c4f3a1b2.safetensors``. Then rank 0 writes the step's file, which names all shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpiddp.serialization import flatten, load, on_host, save, unflatten

from .config import saved_state

FORMAT = 3
"""The version of the format. Checkpoints of the formats 1 and 2 were folders, which this version does not read."""

_STEP = re.compile(r"step-(\d+)(\.safetensors)?")
_FILE = re.compile(r"step-(\d+)(\.rank-\d+\.[0-9a-f]{8})?\.safetensors")
_VISIBLE_S = 60.0
"""How long rank 0 waits to see another rank's file. Network file systems cache for a while that a file is absent."""
_POLL_S = 0.02


class DamagedError(ValueError):
    """A checkpoint is damaged; the text names the file and the damage."""


@dataclass(frozen=True)
class Checkpoint:
    state: dict[str, Any]
    """A state for `mpiddp.save` with ``step`` (int), and often ``score`` (float or None; a larger score is better)."""
    shards: Mapping[int, Any] = field(default_factory=dict)
    """The states that single ranks saved, by rank. Only `read_checkpoint` fills this field."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def frozen(self) -> Checkpoint:
        """Return a copy in host memory. Training does not change the copy while it is written in the background."""
        tree, arrays = flatten(self.state)
        return Checkpoint(unflatten(tree, {name: on_host(x, copy=True) for name, x in arrays.items()}))

    def write(self, path: Path, shards: Mapping[int, Any] | None = None) -> None:
        """Write the step's file, which appears only when it is complete.

        ``shards`` holds, for each rank with own state, the result of `write_shard`. If the rank could not write
        its shard, ``shards`` holds a text instead, and OSError is raised with that text.
        """
        _await_shards(path.parent, shards or {})
        content = {"format": FORMAT, "state": self.state, "shards": dict(shards or {})}
        save(content | {"sha256": _digest(content)}, path)


def write_shard(path: Path, rank: int, state: Any) -> tuple[str, str]:
    """Write the state that ``rank`` alone has for the checkpoint at ``path``; return the file's name and digest.

    A step at the end of an epoch may be saved twice. The name has a part of the digest, so that the second save
    leaves the shards of the first one alone.
    """
    content = {"state": state}
    digest = _digest(content)
    name = f"{path.stem}.rank-{rank:05d}.{digest[:8]}.safetensors"
    save(content | {"sha256": digest}, path.with_name(name))
    return name, digest


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, and check the digests of its files.

    DamagedError if a file is missing or changed; ValueError if another version of mpiddp wrote it in another format.
    """
    if path.is_dir():
        raise ValueError(f"an earlier mpiddp wrote {path}; use the mpiddp that wrote it, or another --output")
    content = _whole(path)
    written = content.get("format")
    if written != FORMAT:
        raise ValueError(f"{path} has format {written}, this mpiddp reads {FORMAT}; use the mpiddp that wrote it")
    shards = {rank: _whole(path.with_name(name), digest) for rank, (name, digest) in content["shards"].items()}
    return Checkpoint(content["state"], {rank: each["state"] for rank, each in shards.items()})


def _whole(path: Path, digest: str | None = None) -> dict[str, Any]:
    """Return the content of a file whose own digest is right, and equal to ``digest`` if the step's file gives one.

    DamagedError otherwise.
    """
    try:
        content = dict(load(path))
        told = content.pop("sha256")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path} is damaged, or cannot be read ({error})") from error
    if _digest(content) != told or digest not in (None, told):
        raise DamagedError(f"{path}: its content is not what was written (SHA-256)")
    return content


def _digest(content: dict[str, Any]) -> str:
    tree, arrays = flatten(content)
    found = hashlib.sha256(json.dumps(tree).encode())
    for x in map(on_host, arrays.values()):
        found.update(f"{x.dtype.str} {x.shape}".encode())
        found.update(x.data)
    return found.hexdigest()


class CheckpointStore:
    """The checkpoints of a run. They are written in the background; the ``keep`` newest and the best are kept.

    Only one process, rank 0, uses the store of a folder.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mpiddp-checkpoint")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        return sorted({int(step[1]) for step in map(_STEP.fullmatch, self._names()) if step})

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # iterdir() raises if the folder cannot be read; glob() would return no entries.
            return [entry.name for entry in self.folder.iterdir()]
        return []

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}.safetensors"

    def save(self, checkpoint: Checkpoint, shards: Mapping[int, Any] | None = None) -> None:
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

        ValueError if one of the checkpoints that it reads has another format, that of another version of mpiddp.
        """
        faults: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                return read_checkpoint(path if path.exists() else path.with_suffix("")), faults
            except DamagedError as error:
                faults.append(str(error))
        return None, faults

    def _write(self, checkpoint: Checkpoint, shards: Mapping[int, Any] | None) -> None:
        try:
            checkpoint.write(self.path(checkpoint.step), shards)
        except OSError:
            self._remove(set(self.steps()), checkpoint.step)  # this leaves no shards, which may have filled the disk
            raise
        self._prune(checkpoint.step)

    def _prune(self, last: int) -> None:
        # A checkpoint of a later step than ``last`` is damaged: otherwise this run would have resumed from it. It must
        # not take the place of a whole one among the newest.
        steps = [step for step in self.steps() if step <= last]
        kept = set(steps[-self.keep :])
        scored = {step: score for step in steps if (score := self._score(step)) is not None}
        if scored:
            kept.add(max(scored, key=lambda step: (scored[step], step)))
        self._remove(kept, last)

    def _remove(self, kept: set[int], last: int) -> None:
        """Remove the files of the steps up to ``last`` that are not in ``kept``."""
        # The file of a step is removed before its shards, because a step counts as damaged if a shard is missing.
        for name in sorted(self._names(), key=len):
            found = _FILE.fullmatch(name)  # a user's copies under other names stay
            if found and int(found[1]) <= last and int(found[1]) not in kept:
                (self.folder / name).unlink(missing_ok=True)

    def _score(self, step: int) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return float(saved_state(self.path(step))["state"]["score"])
        return None


def _await_shards(folder: Path, shards: Mapping[int, Any]) -> None:
    deadline_s = time.monotonic() + _VISIBLE_S
    for found in shards.values():
        if isinstance(found, str):
            raise OSError(found)
        while not (folder / found[0]).exists():
            if time.monotonic() > deadline_s:
                raise OSError(
                    f"{found[0]} is written, and rank 0 does not see it in {folder}: --output has to be in a file"
                    " system that all nodes share"
                )
            time.sleep(_POLL_S)


def sweep(folder: Path) -> None:
    """Remove the unfinished files of processes that died while they wrote into the folder."""
    for entry in filter(Path.is_file, list(folder.glob(".*.tmp"))):  # earlier versions left folders
        entry.unlink(missing_ok=True)
