import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from mpiddp.data import builtin, digits, mnist, synthetic


def test_digits_file() -> None:
    images, labels = builtin.raw_digits()
    assert images.shape == (1797, 8, 8) and images.dtype == np.uint8 and images.max() == 16
    # From the data set's description at UCI.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    path = Path(builtin.__file__).with_name("digits.npz")
    assert path.stat().st_size < 50_000
    with np.load(path, allow_pickle=False) as content:
        text = str(content["README"])
    assert "CC BY 4.0" in text and "Alpaydin" in text and "UCI" in text


def test_digits() -> None:
    x, y = digits().arrays
    x_test, y_test = digits(train=False).arrays
    assert x.shape == (1437, 1, 28, 28) and x_test.shape == (360, 1, 28, 28)
    assert x.dtype == np.float32 and y.dtype == np.int64 and y.shape == (1437,) and x.flags.c_contiguous
    both = np.concatenate([x, x_test]).astype(np.float64)
    assert abs(both.mean()) < 0.002 and abs(both.std() - 1) < 0.002
    assert len(np.unique(both.reshape(1797, -1), axis=0)) == len(np.unique(builtin.raw_digits()[0], axis=0))
    assert np.bincount(y_test, minlength=10).min() > 20
    again, _ = digits().arrays
    assert np.array_equal(x, again)
    other, _ = digits(seed=1).arrays
    assert not np.array_equal(x, other)


def test_digits_as_scanned() -> None:
    x, y = digits(size=8).arrays
    images, labels = builtin.raw_digits()
    scanned = np.rint((x[:, 0].astype(np.float64) * builtin.DIGITS_STD + builtin.DIGITS_MEAN) * 16)
    expected = images[builtin.randperm(1797, 0)[:1437]]
    assert sorted(map(bytes, scanned.astype(np.uint8))) == sorted(map(bytes, expected))
    assert len(y) < len(labels)


@pytest.mark.parametrize(("source", "target"), [(8, 28), (8, 8), (8, 32), (5, 13), (3, 1), (1, 4)])
def test_bilinear_equals_torch(torch, source: int, target: int) -> None:
    weights = builtin.bilinear_weights(source, target)
    assert np.allclose(weights.sum(axis=1), 1)
    image = np.random.default_rng(0).standard_normal((source, source))
    theirs = torch.nn.functional.interpolate(
        torch.tensor(image)[None, None], size=(target, target), mode="bilinear", align_corners=False
    )
    assert np.allclose(weights @ image @ weights.T, theirs[0, 0].numpy(), atol=1e-12)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, train: int = 6, test: int = 3, packed: bool = False) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    content = {}
    for part, n in (("train", train), ("t10k", test)):
        content[part] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        content[f"{part} labels"] = rng.integers(0, 10, n, dtype=np.uint8)
        for name, array in (("images-idx3", content[part]), ("labels-idx1", content[f"{part} labels"])):
            octets = idx(array)
            path = folder / f"{part}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(octets) if packed else octets)
    return content


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", [".", "MNIST/raw"])
def test_mnist(tmp_path: Path, packed: bool, below: str) -> None:
    content = write_mnist(tmp_path / below, packed=packed)
    for part, train in (("train", True), ("t10k", False)):
        x, y = mnist(str(tmp_path), train).arrays
        assert x.shape == (*content[part].shape[:1], 1, 28, 28) and x.dtype == np.float32 and y.dtype == np.int64
        assert np.array_equal(y, content[f"{part} labels"])
        expected = (content[part] / 255 - 0.1307) / 0.3081
        assert np.allclose(x[:, 0], expected, atol=1e-6)


def test_missing_mnist_names_the_file_and_the_cure(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert len(mnist(tmp_path, train=False)) == 3
    with pytest.raises(FileNotFoundError, match=r"train-labels-idx1-ubyte .*curl --create-dirs --output-dir") as caught:
        mnist(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [1, 3, 5, 11, -2, -1])
def test_truncated_files(tmp_path: Path, name: str, packed: bool, cut: int) -> None:
    write_mnist(tmp_path, packed=packed)
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=f"{path.name} .*fetch it again"):
        mnist(tmp_path)


ELSE = (b"<html>404</html>", b"", b"\0\0\x0b\x01\0\0\0\0", b"\x1f\x8bno")
SIX_LABELS = idx(np.zeros(6, np.uint8))


@pytest.mark.parametrize(
    ("part", "content", "said"),
    [
        *(("images-idx3", content, r"train-images-idx3-ubyte is .*fetch it again") for content in ELSE),
        ("labels-idx1", SIX_LABELS + b"\0", "reshape array of size 7 into shape"),
        ("images-idx3", SIX_LABELS, "should hold images"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, part: str, content: bytes, said: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / f"train-{part}-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        mnist(tmp_path)


def test_synthetic_is_learnable() -> None:
    x, y = synthetic(400, (1, 6, 6), 5, seed=3).arrays
    x_test, y_test = synthetic(100, (1, 6, 6), 5, seed=3, train=False).arrays
    assert x.dtype == np.float32 and x.shape == (400, 1, 6, 6) and y.dtype == np.int64
    assert np.bincount(y).tolist() == [80] * 5
    assert not np.array_equal(x[:100], x_test)
    means = np.stack([x[y == k].mean(axis=0).ravel() for k in range(5)])
    distance = ((x_test.reshape(100, 1, -1) - means) ** 2).sum(axis=-1)
    assert (distance.argmin(axis=1) == y_test).mean() > 0.95


def test_synthetic_repeats_and_varies() -> None:
    x, _ = synthetic(10, (3,), seed=1).arrays
    again, _ = synthetic(10, (3,), seed=1).arrays
    other, _ = synthetic(10, (3,), seed=2).arrays
    assert np.array_equal(x, again) and not np.array_equal(x, other)
