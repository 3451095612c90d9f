"""The environment of every unit test, unchanged by tests before it."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def environment():
    """Put the environment back: the command line sets BLAS threads, and later tests start programs."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
