"""Dtypes of samples as text."""

import random

import numpy as np
import pytest

from mpiddp.data.slots import parsed, text_of

KINDS = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"]


def test_a_text_gives_the_dtype_that_it_is_of() -> None:
    draw = random.Random(1)
    for _ in range(100):
        shapes = [tuple(draw.choices((1, 2, 17), k=draw.randrange(3))) for _ in range(draw.randrange(1, 5))]
        dtype = np.dtype([(f"x_{at}", draw.choice(KINDS), shape) for at, shape in enumerate(shapes)])
        assert parsed(text_of(dtype)) == dtype


def test_blanks_and_a_last_semicolon_are_left_out() -> None:
    assert parsed("  x float32 2\t3 ;\n step int64; ") == np.dtype([("x", "f4", (2, 3)), ("step", "i8")])


@pytest.mark.parametrize(
    "text", ["", "x", "x float31", "x float32 -1", "x float32 2.5", "x float32; ; y int8", "1+x int8"]
)
def test_what_is_no_field_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="a field is a name") as caught:
        parsed(text)
    assert repr(text.split(";")[-2 if "; ;" in text else 0])[1:-1] in str(caught.value)
