"""Files that are whole or absent, and the model as one of them. Never a pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

from mpiddp.device import is_device_array
from mpiddp.nn import Module
from mpiddp.typing import Array


def write_whole(path: Path, content: bytes) -> None:
    """Write a file such that, whatever happens on the way, its name shows the old content or the new, never a part.

    Raises
    ------
    OSError
        If it cannot be written, as on a full disk; nothing of it is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were created or changed in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode_arrays(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return arrays, those of a GPU too, as the content of a safetensors file."""
    on_host = {name: x.get() if is_device_array(x) else x for name, x in arrays.items()}  # type: ignore[attr-defined]
    # safetensors writes the memory as it lies, also of an array that is not in C order.
    ordered = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in on_host.items()}
    encoded: bytes = safetensors.numpy.save(ordered, metadata=dict(metadata or {}))
    return encoded


def save_model(path: Path, model: Module) -> None:
    """Save a model's parameters and buffers as safetensors; the file is whole or absent.

    Parameters
    ----------
    path : Path
        The file, ``model.safetensors`` by custom; ``safetensors.numpy.load_file`` gives what ``load_state_dict`` takes.
    model : Module
        The model itself, not its `DistributedDataParallel`.
    """
    write_whole(path, encode_arrays(model.state_dict(), {"format": "np"}))
