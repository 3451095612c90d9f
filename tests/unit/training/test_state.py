"""States are taken apart into JSON and arrays, and put together again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpiddp.training.state import put_together, take_apart

STATE = {
    "iter": 3,
    "rate": 0.1 + 0.2,
    "none": None,
    "flag": True,
    "errors": {0: np.arange(3.0), 7: np.ones((2, 2), np.float32)},
    "memory": [[np.zeros(1)], []],
    "big": 2**127 + 1,
    "numpy": np.float32(0.5),
    "nested": {"a.b": {1: "x"}},
}


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and isinstance(b, type(a) if not isinstance(a, np.generic) else float)


def test_comes_back_through_json():
    tree, arrays = take_apart(STATE, "hook")
    assert set(arrays) == {"hook.errors.0", "hook.errors.7", "hook.memory.0.0"}
    assert arrays["hook.errors.0"] is STATE["errors"][0], "no copies"
    assert same(STATE, put_together(json.loads(json.dumps(tree)), arrays))


def test_of_nothing():
    assert take_apart({}, "x") == ({}, {})
    assert put_together({}, {}) == {}


@pytest.mark.parametrize("what", [{1, 2}, object(), lambda: 0, 1j])
def test_what_json_cannot_say_is_named(what):
    with pytest.raises(TypeError, match=rf"hook\.a\.1 is a {type(what).__name__}"):
        take_apart({"a": [0, what]}, "hook")
