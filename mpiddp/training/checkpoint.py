"""``Checkpoint``: arrays as safetensors, the rest as JSON, and a manifest that tells a damaged one. Never a pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from mpiddp.nn import Module
from mpiddp.serialization import encode_arrays, on_host, save, write_synced
from mpiddp.typing import Array

from .files import whole_folder
from .parts import AwaitedParts, entry, part_name

ARRAYS, STATE, MANIFEST = "arrays.safetensors", "state.json", "manifest.json"
FORMAT = 2
"""Raised when an older mpiddp could not read what a newer one writes; format 1 had no parts."""

_PART = re.compile(re.escape(part_name(0)).replace("00000", r"(\d+)"))


class DamagedError(ValueError):
    """A checkpoint is not what was written: the text names the file and what is wrong with it."""


class NewerFormatError(ValueError):
    """A checkpoint is whole, for all that one knows, but of a newer mpiddp."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run is made of at one step."""

    arrays: Mapping[str, Array]
    state: dict[str, Any]
    """What JSON knows; ``step`` (int) is always there, ``score`` (float or None) says how good it is."""
    parts: Mapping[int, Mapping[str, Array]] = field(default_factory=dict)
    """What single ranks had, by rank; of a checkpoint that was read."""

    @property
    def step(self) -> int:
        """Steps made."""
        return int(self.state["step"])

    @property
    def score(self) -> float | None:
        """How good the model is, larger is better; None where nobody has looked."""
        return self.state.get("score")

    def frozen(self) -> Checkpoint:
        """Return a copy, on the host, that further training does not change."""
        return Checkpoint(frozen_arrays(self.arrays), json.loads(json.dumps(self.state)))

    def write(self, folder: Path, awaited: AwaitedParts | None = None) -> None:
        """Write it as a folder that is whole or absent, with the parts that other ranks put there."""
        with whole_folder(folder) as pending:
            contents = {ARRAYS: encode_arrays(self.arrays), STATE: _json_bytes(self.state)}
            for name, content in contents.items():
                write_synced(pending / name, content)
            files = {name: entry(content) for name, content in contents.items()}
            if awaited is not None:
                files |= awaited.receive(pending)
            write_synced(pending / MANIFEST, _json_bytes({"format": FORMAT, "files": files}))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint and compare it with its manifest.

    Raises
    ------
    DamagedError
        If a file is missing, or has another length or other bytes than were written.
    NewerFormatError
        If it is not for this mpiddp to read.
    """
    try:
        manifest = json.loads(_read(folder / MANIFEST))
        written = manifest["format"]
        expected = {name: (each["bytes"], each["sha256"]) for name, each in manifest["files"].items()}
        missing = {ARRAYS, STATE} - set(expected)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder / MANIFEST} is damaged ({error})") from error
    if missing:
        raise DamagedError(f"{folder / MANIFEST} is damaged (it does not name {', '.join(sorted(missing))})")
    if written not in (1, FORMAT):
        raise NewerFormatError(
            f"{folder} has format {written}, this mpiddp reads {FORMAT}; use the mpiddp that wrote it"
        )
    contents = {name: _read(folder / name) for name in expected}
    for name, (size, digest) in expected.items():
        found = entry(contents[name])
        if found["bytes"] != size:
            raise DamagedError(f"{folder / name} has {found['bytes']} bytes, {size} were written")
        if found["sha256"] != digest:
            raise DamagedError(f"{folder / name} has other bytes than were written (SHA-256)")
    parts = {
        int(match[1]): safetensors.numpy.load(contents[name]) for name in expected if (match := _PART.fullmatch(name))
    }
    return Checkpoint(safetensors.numpy.load(contents[ARRAYS]), json.loads(contents[STATE]), parts)


def read_score(folder: Path) -> float | None:
    """Return a checkpoint's score without reading its arrays.

    Raises
    ------
    DamagedError
        If the file that holds it is missing or no JSON.
    """
    try:
        score: float | None = json.loads(_read(folder / STATE))["score"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / STATE} is damaged ({error})") from error
    return score


def save_model(path: Path, model: Module) -> None:
    """Save a model's parameters and buffers as safetensors; the file is whole or absent.

    Parameters
    ----------
    path : Path
        The file, ``model.safetensors`` by custom; ``safetensors.numpy.load_file`` gives what ``load_state_dict`` takes.
    model : Module
        The model itself, not its `DistributedDataParallel`.
    """
    save(model.state_dict(), path)


def frozen_arrays(arrays: Mapping[str, Array]) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies, on the host, in C order."""
    return {name: on_host(x, copy=True) for name, x in arrays.items()}


def _json_bytes(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
