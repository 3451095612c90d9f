import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpiddp.data.files import NAMES, as_inputs, labelled, open_labelled, open_npz

ARRAYS = {
    "plain": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "none": np.zeros((0, 3), np.int16),
    "number": np.array(3.5),
    "big-endian": np.arange(5, dtype=">i4"),
    "record": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
}


def test_npz_maps_what_is_stored_and_reads_what_is_packed(tmp_path: Path) -> None:
    np.savez(tmp_path / "stored.npz", **ARRAYS)
    np.savez_compressed(tmp_path / "packed.npz", **ARRAYS)
    for file, kind in (("stored", np.memmap), ("packed", np.ndarray)):
        path = tmp_path / f"{file}.npz"
        for name, found in zip(reversed(ARRAYS), open_npz(path, lambda names: names[::-1]), strict=True):
            assert type(found) is kind, (file, name)
            assert found.dtype == ARRAYS[name].dtype and np.array_equal(found, ARRAYS[name]), (file, name)


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_npz_is_named(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "a.npz"
    (np.savez_compressed if packed else np.savez)(path, x=np.arange(1000))
    whole = path.read_bytes()
    for cut in (0, 3, 50, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.npz cannot be read"):
            open_npz(path, list)
    start = whole.index(b"x.npy") + 40
    path.write_bytes(whole[:start] + bytes(30) + whole[start + 30 :])
    with pytest.raises(ValueError, match=r"a\.npz, array 'x', "):
        open_npz(path, list)


@pytest.mark.parametrize(
    ("way", "old", "new", "said"),
    [
        *((zipfile.ZIP_STORED, b"{'", broken, "cannot be ") for broken in (b"{(", b"{1", b"\0\0")),
        *((zipfile.ZIP_DEFLATED, b"{'", broken, "cannot be ") for broken in (b"{(", b"{1", b"\0\0")),
        (zipfile.ZIP_STORED, b"(1000,)", b"(999,) ", r"cannot be read \(its header does not fit"),
    ],
)
def test_wrong_headers_are_found(tmp_path: Path, way: int, old: bytes, new: bytes, said: str) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))
    content = (tmp_path / "x.npy").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz", "w", way) as archive:
        archive.writestr("x.npy", content.replace(old, new))
        archive.writestr("y.npy", content)
    with pytest.raises(ValueError, match=rf"a\.npz, array 'x', {said}"):
        open_npz(tmp_path / "a.npz", list)
    assert open_npz(tmp_path / "a.npz", lambda _: ["y"])[0][-1] == 999


def test_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"array 'x', cannot be read \(it holds Python objects"):
        open_npz(tmp_path / "a.npz", list)


SAMPLES = np.random.default_rng(0).integers(0, 256, (20, 5, 5), dtype=np.uint8)
LABELS = np.arange(20, dtype=np.uint8) % 3


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_labelled_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    np.savez(tmp_path / "all.npz", **dict(zip(names, [SAMPLES, LABELS, SAMPLES[:4], LABELS[:4]], strict=False)))
    arrays = open_labelled(tmp_path / "all.npz")
    assert len(arrays) == len(names) and isinstance(arrays[0], np.memmap)
    train, test = labelled(arrays, seed=3)
    assert (len(train), len(test)) == ((20, 4) if len(names) == 4 else (18, 2))
    seen = []
    for part in (train, test):
        x, y = part.batch(np.arange(len(part)))
        assert x.dtype == np.float32 and x.shape == (len(part), 1, 5, 5) and y.dtype == np.int64
        seen += [(row.tobytes(), int(label)) for row, label in zip(x, y, strict=True)]
        single, label = part[1]
        assert np.array_equal(single, x[1]) and label == y[1]
    everything = [(row.tobytes(), int(label)) for row, label in zip(np.float32(SAMPLES) / 255, LABELS, strict=True)]
    if len(names) == 2:
        assert sorted(seen) == sorted(everything), "each sample is in one of the parts"
    else:
        assert seen == everything + everything[:4]


def test_other_samples_stay_as_they_are() -> None:
    x = np.arange(6.0).reshape(2, 3)
    assert as_inputs(x).dtype == np.float32 and np.array_equal(as_inputs(x), x)
    assert as_inputs(np.ones((2, 3, 4, 5), ">f4")).shape == (2, 3, 4, 5)
    assert as_inputs(np.full((2, 3, 4, 5), 255, np.uint8)).max() == 1


def test_wrong_labelled_files_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=SAMPLES, z=LABELS)
    with pytest.raises(ValueError, match=r"a\.npz .*\(it has arrays x, z; expected x_train, y_train, x_test, "):
        open_labelled(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        open_labelled(tmp_path / "none.npz")
    wrong: list[tuple[Any, Any]] = [
        *((SAMPLES, bad) for bad in (LABELS[:-1], LABELS.astype(float), np.eye(20, 3, dtype=int))),
        *((SAMPLES.astype(int).astype(kind), LABELS) for kind in ("U3", "complex64", "datetime64[s]")),
    ]
    expected = r"samples \(n, \.\.\.\) of real numbers and integer labels \(n,\)"
    for x, y in wrong:
        np.savez(tmp_path / "a.npz", x=x, y=y)
        with pytest.raises(ValueError, match=rf"a\.npz: expected {expected}, got "):
            open_labelled(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=SAMPLES, y=LABELS[:, None])
    assert open_labelled(tmp_path / "a.npz")[1].shape == (20,)


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_samples_for_a_test_say_so(n: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 samples are needed, .* there are {n}"):
        labelled([np.zeros((n, 3)), np.zeros(n, np.int64)])
