"""Conversions between float32 and float16 have NumPy's bits, whatever the number."""

import numpy as np
import pytest

from mpiddp.device import half

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def narrowed(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(np.float16)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    kind = f"u{expected.itemsize}"
    np.testing.assert_array_equal(found.view(kind), expected.view(kind))


def test_every_half_goes_there_and_back() -> None:
    with np.errstate(all="ignore"):
        singles = HALVES.astype(np.float32)
    assert_same_bits(half.converted(HALVES, np.float32), singles)
    assert_same_bits(half.converted(singles, np.float16), narrowed(singles))


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_ties_and_their_neighbours_are_rounded_as_numpy_rounds(ulps: int) -> None:
    finite = np.sort(HALVES[np.isfinite(HALVES)].astype(np.float32))
    ties = (finite[1:] + finite[:-1]) / 2
    near = (ties.view(np.int32) + ulps).view(np.float32)
    assert_same_bits(half.converted(near, np.float16), narrowed(near))


def test_any_bits() -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 200_003, dtype=np.uint32).view(np.float32)
    assert np.isnan(x).any()
    for each in (x, x[~np.isnan(x)]):
        assert_same_bits(half.converted(each, np.float16), narrowed(each))


@pytest.mark.parametrize(
    "x",
    [
        np.array([65504, 65519.99, 65520, 65536, 1e9, np.inf, -np.inf, 0, -0.0, 1e-45, 2**-25, 3 * 2**-26], np.float32),
        np.zeros((0, 3), np.float32),
        np.float32(0.1).reshape(()),
        np.linspace(-9, 9, 24, dtype=np.float32).reshape(4, 6).T,
        np.linspace(-9, 9, 24, dtype=np.float32)[::3],
        np.linspace(-9, 9, 24),
    ],
    ids=["edges", "none", "scalar", "transposed", "strided", "float64"],
)
def test_shapes_layouts_and_other_types(x: np.ndarray) -> None:
    found = half.converted(x, np.float16)
    assert found.shape == x.shape and found.dtype == np.float16
    np.testing.assert_array_equal(found, narrowed(x))
    target = np.full(x.shape, 7, np.float16)
    with np.errstate(over="ignore"):
        half.assign(target, x)
    np.testing.assert_array_equal(target, found)
