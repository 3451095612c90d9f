"""Batch normalization against torch, and dtypes that it refuses."""

from typing import Any

import numpy as np
import pytest
from harness.oracle import compare, draw

from mpiddp import nn
from mpiddp.autograd import gradcheck


def layer(dtype: str, training: bool) -> Any:
    made = nn.BatchNorm1d(3, 1e-4, 0.2, dtype=dtype).train(training)
    made.ndims = ()
    made.running_mean[...], made.running_var[...] = (0.5, -1, 2), (1.5, 0.7, 2)
    return made


def applied(made: Any, x: Any, weight: Any, bias: Any) -> Any:
    vars(made)["weight"], vars(made)["bias"] = weight, bias  # tensors of the test, as those of a layer
    return made(x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(torch, shape: tuple[int, ...], training: bool, dtype: str) -> None:
    mine = layer(dtype, training)
    theirs = torch.tensor(mine.running_mean.copy()), torch.tensor(mine.running_var.copy())
    inputs = draw(shape, (3,), (3,))
    compare(
        lambda x, w, b: applied(mine, x, w, b),
        lambda x, w, b: torch.nn.functional.batch_norm(x, *theirs, w, b, training, 0.2, 1e-4),
        inputs,
        dtype,
    )
    np.testing.assert_allclose(mine.running_mean, theirs[0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(mine.running_var, theirs[1].numpy(), rtol=1e-5)
    assert gradcheck(lambda x, w, b: applied(layer("float64", training), x, w, b), inputs)


def test_batch_norm_refuses_other_dtypes() -> None:
    single, double, half = (np.ones(3, dtype) for dtype in ("float32", "float64", "float16"))
    x = draw((4, 3))[0]
    for given, parameters, cure in (
        ("float32", (double, single), r"float64: convert weight.astype\('float32'\)"),
        ("float32", (half, single), r"float16: convert x.astype"),
        ("float16", (single, single), r"float32: convert x.astype"),
    ):
        with pytest.raises(RuntimeError, match=f"needs input and weight of one dtype, got {given} and {cure}"):
            applied(layer("float32", True), x.astype(given), *parameters)
    assert layer("float64", True)(x).dtype == "float64"
