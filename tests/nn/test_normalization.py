"""Normalizations against torch, and dtypes that they refuse."""

import numpy as np
import pytest
from harness.oracle import compare, draw

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp.autograd import gradcheck


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(torch, shape: tuple[int, ...], training: bool, affine: bool, dtype: str) -> None:
    mean, var = np.array([0.5, -1, 2], dtype), np.array([1.5, 0.7, 2], dtype)
    theirs = torch.tensor(mean), torch.tensor(var)
    inputs = draw(shape, (3,), (3,)) if affine else draw(shape)
    compare(
        lambda x, w=None, b=None: F.batch_norm(x, mean, var, w, b, training, 0.2, 1e-4),
        lambda x, w=None, b=None: torch.nn.functional.batch_norm(x, *theirs, w, b, training, 0.2, 1e-4),
        inputs,
        dtype,
    )
    np.testing.assert_allclose(mean, theirs[0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(var, theirs[1].numpy(), rtol=1e-5)
    assert gradcheck(lambda x, *wb: F.batch_norm(x, mean.copy(), var.copy(), *(wb or (None, None)), training), inputs)


def test_batch_norm_refuses_other_dtypes() -> None:
    single, double, half = (np.ones(4, dtype) for dtype in ("float32", "float64", "float16"))
    x = draw((3, 4))[0]
    for given, parameters, cure in (
        ("float32", (double, single), r"float64: convert weight.astype\('float32'\)"),
        ("float32", (None, double), r"float64: convert weight.astype\('float32'\)"),
        ("float32", (half, single), r"float16: convert x.astype"),
        ("float16", (single, single), r"float32: convert x.astype"),
    ):
        with pytest.raises(RuntimeError, match=f"needs input and weight of one dtype, got {given} and {cure}"):
            F.batch_norm(x.astype(given), None, None, *parameters, training=True)
    assert F.batch_norm(x, None, None, double, double, training=True).dtype == "float64"
