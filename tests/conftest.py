"""Chooses what pytest is here: a rank under a launcher, or the plain process that starts the ranks."""

from __future__ import annotations

import os

import pytest
from harness import launcher

UNDER_LAUNCHER = launcher.announced_size() > 0 or launcher.PLAN in os.environ

# harness.ranks starts MPI when it is imported, which the plain process must never do.
pytest_plugins = ["harness.ranks" if UNDER_LAUNCHER else "harness.parent"]


def pytest_configure(config: pytest.Config) -> None:
    """Name our marks."""
    config.addinivalue_line("markers", "core: of the communication core, so also run without eager buffers")
    config.addinivalue_line("markers", "once: says nothing of the MPI library, so to run it with one of them is enough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests that start launchers to the plain process."""
    if UNDER_LAUNCHER:
        skip = pytest.mark.skip(reason="starts mpiexec itself, so it is run from a plain pytest, not under mpiexec")
        for item in items:
            if not {config.rootpath / "tests" / folder for folder in ("launch", "with_torch")}.isdisjoint(
                item.path.parents
            ):
                item.add_marker(skip)
