"""What every unit test gets: an environment that nobody before it has changed."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def environment():
    """Put the environment back: the command line sets BLAS threads, and later tests start programs with what is set."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
