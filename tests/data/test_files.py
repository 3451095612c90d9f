from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpiddp.data.builtin import ByteWindows, split_text, text
from mpiddp.data.files import NAMES, as_inputs, labelled, npz_names, open_labelled, open_npy, open_npz, read_idx

from .test_builtin import idx

ARRAYS = {
    "plain": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "none": np.zeros((0, 3), np.int16),
    "number": np.array(3.5),
    "big-endian": np.arange(5, dtype=">i4"),
    "record": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_npy_is_mapped(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "a.npy", ARRAYS[name])
    mapped = open_npy(tmp_path / "a.npy")
    assert isinstance(mapped, np.memmap) and not mapped.flags.writeable
    assert mapped.dtype == ARRAYS[name].dtype and np.array_equal(mapped, ARRAYS[name])


def test_npz_maps_what_is_stored_and_reads_what_is_packed(tmp_path: Path) -> None:
    np.savez(tmp_path / "stored.npz", **ARRAYS)
    np.savez_compressed(tmp_path / "packed.npz", **ARRAYS)
    for file, kind in (("stored", np.memmap), ("packed", np.ndarray)):
        path = tmp_path / f"{file}.npz"
        assert npz_names(path) == list(ARRAYS)
        names = list(reversed(ARRAYS))
        for name, found in zip(names, open_npz(path, names), strict=True):
            assert type(found) is kind, (file, name)
            assert found.dtype == ARRAYS[name].dtype and np.array_equal(found, ARRAYS[name]), (file, name)


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_npz_is_named(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "a.npz"
    (np.savez_compressed if packed else np.savez)(path, x=np.arange(1000))
    whole = path.read_bytes()
    for cut in (0, 3, 50, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.npz is no .npz file"):
            open_npz(path, ["x"])
    start = whole.index(b"x.npy") + 40
    path.write_bytes(whole[:start] + bytes(30) + whole[start + 30 :])
    with pytest.raises(ValueError, match=r"a\.npz, array 'x', "):
        open_npz(path, ["x"])


@pytest.mark.parametrize("broken", [b"{(", b"{1", b"\0\0"])
@pytest.mark.parametrize("way", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_header_that_is_no_expression_is_found(tmp_path: Path, broken: bytes, way: int) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))
    content = (tmp_path / "x.npy").read_bytes().replace(b"{'", broken)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", way) as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(ValueError, match=r"a\.npz, array 'x', cannot be "):
        open_npz(tmp_path / "a.npz", ["x"])


def test_header_that_lies_is_found(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))
    content = (tmp_path / "x.npy").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content.replace(b"(1000,)", b"(0999,)").replace(b"(0999,)", b"(999,) "))
        archive.writestr("y.npy", content)
    with pytest.raises(ValueError, match="array 'x', is damaged"):
        open_npz(tmp_path / "a.npz", ["x"])
    assert open_npz(tmp_path / "a.npz", ["y"])[0][-1] == 999


def test_damaged_npy_and_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"a\.npy cannot be mapped \(it holds Python objects"):
        open_npy(path)
    np.save(path, np.arange(100))
    whole = path.read_bytes()
    for cut in (0, 3, 8, 50, 130, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.npy cannot be mapped"):
            open_npy(path)


def test_idx_is_mapped_unless_packed_or_of_several_bytes(tmp_path: Path) -> None:
    for array, code, mapped in ((np.arange(6, dtype=np.uint8), 8, True), (np.arange(6, dtype=np.int16), 11, False)):
        (tmp_path / "plain").write_bytes(idx(array, code))
        (tmp_path / "packed").write_bytes(gzip.compress(idx(array, code)))
        assert isinstance(read_idx(tmp_path / "plain"), np.memmap) == mapped
        assert type(read_idx(tmp_path / "packed")) is np.ndarray
        for name in ("plain", "packed"):
            assert np.array_equal(read_idx(tmp_path / name), array)


SAMPLES = np.random.default_rng(0).integers(0, 256, (20, 5, 5), dtype=np.uint8)
LABELS = np.arange(20, dtype=np.uint8) % 3


def write(folder: Path, kind: str, count: int, names: tuple[str, ...]) -> list[Path]:
    arrays = [SAMPLES, LABELS, SAMPLES[:4], LABELS[:4]][:count]
    if kind == "npz":
        np.savez(folder / "all.npz", **dict(zip(names, arrays, strict=True)))
        return [folder / "all.npz"]
    for name, x in zip(names, arrays, strict=True):
        if kind == "idx":
            (folder / name).write_bytes(idx(x, 8))
        else:
            np.save(folder / f"{name}.npy", x)
    return [folder] if kind == "folder" else [folder / f"{name}{'.npy' * (kind == 'npy')}" for name in names]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("kind", ["npz", "npy", "folder", "idx"])
def test_labelled_files(tmp_path: Path, kind: str, names: tuple[str, ...]) -> None:
    paths = write(tmp_path, kind, len(names), names)
    arrays = open_labelled("npy" if kind == "folder" else kind, paths)
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
    with pytest.raises(ValueError, match=r"a\.npz has arrays x, z; expected x_train, y_train, x_test, y_test or "):
        open_labelled("npz", [tmp_path / "a.npz"])
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        open_labelled("npz", [tmp_path / "none.npz"])
    for kind in ("npy", "idx"):
        with pytest.raises(ValueError, match=f"{kind} data is .*2 or 4 files .*got 3"):
            open_labelled(kind, ["a", "b", "c"])
    bad: Any
    for bad in (LABELS[:-1], LABELS.astype(float), np.eye(20, 3, dtype=int)):
        np.savez(tmp_path / "a.npz", x=SAMPLES, y=bad)
        with pytest.raises(ValueError, match=r"a\.npz: expected samples \(n, \.\.\.\) and integer labels \(n,\), got"):
            open_labelled("npz", [tmp_path / "a.npz"])
    np.savez(tmp_path / "a.npz", x=SAMPLES, y=LABELS[:, None])
    assert open_labelled("npz", [tmp_path / "a.npz"])[1].shape == (20,)


WORDS = bytes(range(256)) * 4


@pytest.mark.parametrize("window", [1, 7, 64, 90])
def test_text_windows_cover_the_text_once(tmp_path: Path, window: int) -> None:
    (tmp_path / "words").write_bytes(WORDS)
    train, validation = text(tmp_path / "words", window)
    assert isinstance(train.tokens, np.memmap), "a file is mapped, not read"
    for part, content in ((train, WORDS[:922]), (validation, WORDS[922:])):
        inputs, targets = part.batch(np.arange(len(part)))
        assert len(part) == (len(content) - 1) // window
        assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == targets.shape == (len(part), window)
        assert inputs.flags.c_contiguous and targets.flags.c_contiguous
        assert bytes(inputs.ravel().tolist()) == content[: len(part) * window]
        assert bytes(targets.ravel().tolist()) == content[1 : len(part) * window + 1]
        one = part[len(part) - 1]
        assert all(np.array_equal(mine, row[-1]) for mine, row in zip(one, (inputs, targets), strict=True))
        assert np.array_equal(part[[0, -1]][0], inputs[[0, -1]])
        with pytest.raises(IndexError):
            part[len(part)]


def test_text_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a text of 100 bytes is too short for windows of 10: .* take 110 bytes"):
        split_text(np.zeros(100, np.uint8), 10)
    assert [len(part) for part in split_text(np.zeros(110, np.uint8), 10)] == [9, 1]
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty is empty"):
        text(tmp_path / "empty")
    with pytest.raises(ValueError, match="1 <= window < n"):
        ByteWindows(np.zeros(3, np.uint8), 3)


@pytest.mark.parametrize("kind", ["U3", "complex64", "datetime64[s]"])
def test_samples_that_are_no_real_numbers_are_refused(tmp_path: Path, kind: str) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2), int).astype(kind), y=np.arange(4))
    with pytest.raises(ValueError, match=r"d\.npz: expected samples of real numbers, got "):
        open_labelled("npz", [tmp_path / "d.npz"])


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_samples_for_a_test_say_so(n: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 samples are needed, .* there are {n}"):
        labelled([np.zeros((n, 3)), np.zeros(n, np.int64)])
