"""``save`` and ``load``: nested state in one file, arrays as safetensors and the rest as JSON.

There is no pickle, so a file from elsewhere is read without running code. Checkpoints use the same functions.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from .device import is_device_array, is_masked
from .typing import Array

_STATE = "mpiddp.state"
"""Key of the JSON part among the metadata of a safetensors file."""
_ARRAY, _PAIRS, _TUPLE = "__array__", "__pairs__", "__tuple__"
"""Keys of the stand-ins for an array, for a dict whose keys are not all ordinary strings, and for a tuple."""
_DTYPES = frozenset(
    "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64".split()  # noqa: SIM905
)
_WRITER = f"{os.getpid()}-{secrets.token_hex(4)}"
"""Name of this process in names of temporary files. Process ids alone repeat, since containers count from 1."""


def save(obj: Any, f: str | Path) -> None:
    """Save a nested state to one file, which is replaced as a whole or not at all.

    The call is no collective: each rank that calls it writes the file. So let only one rank, such as rank 0, save a
    state that is equal on all ranks. Arrays are stored in safetensors format under their dotted paths, such as
    ``optimizer.state.0.momentum_buffer``. ``safetensors.numpy.load_file`` can read them.

    Parameters
    ----------
    obj : Any
        Arrays (NumPy, CuPy, leaf tensors), numbers, strings and None in dicts, lists and tuples, nested at will.
        Anything else raises TypeError, which names its path.
    f : path
        The file. The content is written to a temporary file beside it, which is then renamed. The folder is made if it
        is missing. After an OSError, such as a full disk, the old file is still there.

    Examples
    --------
    >>> if dist.get_rank() == 0:  # doctest: +SKIP
    ...     dist.save({"model": model.state_dict(), "epoch": epoch}, "snapshot.safetensors")
    >>> dist.barrier()  # doctest: +SKIP
    >>> snapshot = dist.load("snapshot.safetensors")  # on all ranks  # doctest: +SKIP
    """
    tree, arrays = flatten(obj)
    write_atomically(Path(f), encode_arrays(arrays, {_STATE: json.dumps(tree)}))


def load(f: str | Path) -> Any:
    """Return the state that `save` has written; a safetensors file of other origin gives a dict of its arrays.

    Arrays are NumPy arrays that may be written to. Mappings come back as dicts, named tuples as tuples, and NumPy
    scalars as Python numbers. A missing file raises FileNotFoundError. A file that is truncated, or no safetensors
    file, raises ValueError.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": np.arange(2.0), "betas": (0.9, 0.99), "state": {0: None}}, f"{folder}/s.safetensors")
    ...     load(f"{folder}/s.safetensors")
    {'w': array([0., 1.]), 'betas': (0.9, 0.99), 'state': {0: None}}
    """
    path = Path(f)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: mpiddp.save writes one")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            arrays = {name: np.require(file.get_tensor(name), requirements="W") for name in file.keys()}  # noqa: SIM118
            tree = (file.metadata() or {}).get(_STATE)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated, or no safetensors file ({error}); save it again") from error
    return arrays if tree is None else unflatten(json.loads(tree), arrays)


def flatten(state: Any, name: str = "") -> tuple[Any, dict[str, Array]]:
    """Separate a nested state into a tree for JSON, and its arrays, not copied, by their dotted paths.

    It raises TypeError as `save` does.

    Examples
    --------
    >>> flatten({"iter": 3, "error": {0: np.zeros(2)}}, "hook")[1]
    {'hook.error.0': array([0., 0.])}
    """
    arrays: dict[str, Array] = {}

    def visit(value: Any, at: str) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic() if value.dtype.kind in "biuf" and value.itemsize <= 8:
                return value.item()
            case tuple():
                return {_TUPLE: [visit(each, _join(at, place)) for place, each in enumerate(value)]}
            case list():
                return [visit(each, _join(at, place)) for place, each in enumerate(value)]
            case Mapping() if all(isinstance(key, str) and key not in (_ARRAY, _PAIRS, _TUPLE) for key in value):
                return {key: visit(each, _join(at, key)) for key, each in value.items()}
            case Mapping():
                return {_PAIRS: [[visit(key, at), visit(each, _join(at, key))] for key, each in value.items()]}
        array, key = _array_of(value, at), at or "array"
        while key in arrays:  # two paths may look alike, as in {"a.b": x, "a": {"b": y}}
            key += "'"
        arrays[key] = array
        return {_ARRAY: key}

    return visit(state, name), arrays


def unflatten(tree: Any, arrays: Mapping[str, Array]) -> Any:
    """Return the state of which `flatten` made ``tree`` and ``arrays``. The arrays are not copied."""
    match tree:
        case {"__array__": name}:
            return arrays[name]
        case {"__pairs__": pairs}:
            return {unflatten(key, arrays): unflatten(value, arrays) for key, value in pairs}
        case {"__tuple__": values}:
            return tuple(unflatten(value, arrays) for value in values)
        case dict():
            return {key: unflatten(value, arrays) for key, value in tree.items()}
        case list():
            return [unflatten(value, arrays) for value in tree]
    return tree


def _join(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


def _array_of(value: Any, at: str) -> Array:
    """Return the array that a value is or holds. If safetensors does not have its dtype, raise TypeError."""
    where = at or "the state"
    try:
        array = getattr(value, "__mpiddp_array__", value)
    except ValueError as error:  # a tensor that is no leaf
        raise TypeError(f"{where}: {error}") from error
    if not isinstance(array, np.ndarray) and not is_device_array(array):
        raise TypeError(
            f"{where} is a {type(value).__name__}: expected arrays, numbers, strings and None in dicts, lists and"
            " tuples; convert it, or leave it out"
        )
    if array.dtype.name not in _DTYPES or is_masked(array):
        kind = "a masked array" if is_masked(array) else "an array"
        raise TypeError(
            f"{where} is {kind} of {array.dtype}, which a safetensors file cannot hold; convert it to or view it as"
            f" one of {', '.join(sorted(_DTYPES))}"
        )
    return array  # type: ignore[no-any-return]


def encode_arrays(arrays: Mapping[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """Return the content of a safetensors file with ``arrays``, which may be on the host or on a GPU."""
    return safetensors.numpy.save({name: on_host(x) for name, x in arrays.items()}, metadata)


def on_host(x: Any, copy: bool = False) -> np.ndarray[Any, Any]:
    """Return an array on the host, in C order and native byte order.

    It is copied only where that is needed, or always if ``copy``.
    """
    host = x.get() if is_device_array(x) else x
    # safetensors writes the memory of an array as it is, so an array in another order would be stored wrongly.
    make = np.array if copy else np.asarray
    return make(host, host.dtype.newbyteorder("="), order="C")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at any time its name has the old content or the new content, never a part.

    If the file cannot be written, as on a full disk, OSError is raised and no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{_WRITER}.tmp")  # in the same file system
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # the error of a full disk has no file name
        raise


def _sync_folder(folder: Path) -> None:
    """Write the folder to the disk, so that files created or renamed in it survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["load", "save"]
