"""Nested states come back from one file to the bit; a file is replaced as a whole or not at all."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import mpiddp as dist
from mpiddp import nn, serialization
from mpiddp.serialization import flatten, write_atomically, write_synced

RNG = np.random.default_rng(0)
STATE: dict[Any, Any] = {
    "iter": 3,
    "rate": 0.1 + 0.2,
    "none": None,
    "flag": True,
    "errors": {0: np.arange(3.0), 7: np.ones((2, 2), np.float32), (1, None): np.zeros(0)},
    "memory": [[np.zeros(1)], [], (1, (np.ones(1), "x"))],
    "big": 2**127 + 1,
    "best": float("-inf"),
    "numpy": np.float32(0.5),
    "nested": {"a.b": {1: "x", "1": "y"}},
    "__array__": "not an array",
    "a.b": np.array(1.0),
    "a": {"b": np.array(2.0)},
    "columns": RNG.standard_normal((3, 4)).T,
    "empty": np.empty((0, 4)),
    "big endian": np.arange(3, dtype=">i4"),
    "complex": np.array([1 + 2j], np.complex64),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype.newbyteorder("=") == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and type(a) is type(b) and all(map(same, a, b))
    return a == b and isinstance(b, type(a) if not isinstance(a, np.generic) else float)


def test_comes_back_through_a_file(tmp_path: Path) -> None:
    dist.save(STATE, tmp_path / "made" / "state")
    loaded = dist.load(str(tmp_path / "made" / "state"))
    assert same(STATE, loaded)
    loaded["errors"][0] += 1  # may be written to
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["state"]


def test_others_read_it_and_it_reads_others(tmp_path: Path) -> None:
    nn.manual_seed(2)
    model = nn.Linear(2, 3)
    dist.save(model.state_dict(), tmp_path / "model")
    read = safetensors.numpy.load_file(tmp_path / "model")
    assert same(dict(sorted(model.state_dict().items())), dict(sorted(read.items())))
    dist.save({"w": model.weight}, tmp_path / "tensor")
    assert np.array_equal(dist.load(tmp_path / "tensor")["w"], model.weight.data)
    safetensors.numpy.save_file({"x": np.ones(2)}, tmp_path / "other")
    assert same(dist.load(tmp_path / "other"), {"x": np.ones(2)})


@pytest.mark.parametrize("what", [{1, 2}, object(), lambda: 0, 1j, b"x", np.longdouble(1), Path("p")])
def test_a_value_that_cannot_be_saved_is_named_by_its_path(tmp_path: Path, what: object) -> None:
    with pytest.raises(TypeError, match=rf"^a\.1 is a {type(what).__name__}: expected arrays, numbers"):
        dist.save({"a": [0, what]}, tmp_path / "state")
    with pytest.raises(TypeError, match=r"^the state is a "):
        dist.save(what, tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("x", [np.zeros(2, complex), np.array(["a"]), np.array([None]), np.zeros(1, "i4,f4")])
def test_an_array_that_cannot_be_saved_is_named_by_its_path(x: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"^optimizer\.3\.m is an array of .*; convert it to or view it as one of bool"):
        flatten({"optimizer": {3: {"m": x}}})


def test_masks_and_graphs_are_not_lost_silently() -> None:
    with pytest.raises(TypeError, match="a is a masked array of float64"):
        flatten({"a": np.ma.zeros(3)})
    with pytest.raises(TypeError, match=r"^loss: .*pass tensor.detach\(\)"):
        flatten({"loss": nn.Linear(2, 1)(np.ones((1, 2), np.float32))})


def test_truncated_missing_and_other_files_are_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="f is no file"):
        dist.load(tmp_path / "f")
    dist.save(STATE, tmp_path / "f")
    content = (tmp_path / "f").read_bytes()
    for wrong in (b"not one", b"\xff" * 100, *(content[:length] for length in range(0, len(content), 97))):
        (tmp_path / "f").write_bytes(wrong)
        with pytest.raises(ValueError, match=f"{tmp_path}/f is truncated, or no safetensors file"):
            dist.load(tmp_path / "f")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "f"
    for content in (b"one", b"two"):
        write_atomically(path, content)

    def fail(beside: Path, content: bytes) -> None:
        beside.write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(serialization, "write_synced", fail)
    with pytest.raises(OSError, match="No space"):
        dist.save({"epoch": 3}, path)
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["f"]


def test_a_full_disk_is_said_with_the_files_name() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_synced(Path("/dev/full"), b"much")
