"""Chooses what pytest is here: a rank under a launcher, or the plain process that starts the ranks."""

from __future__ import annotations

import os

import pytest
from harness import launcher

UNDER_LAUNCHER = launcher.announced_size() > 0 or launcher.PLAN in os.environ

# harness.ranks starts MPI when it is imported, which the plain process must never do.
pytest_plugins = ["harness.ranks" if UNDER_LAUNCHER else "harness.parent"]

MARKS = {
    "core": "touches MPI: of tests/mpi, so run on 1 to 4 ranks, with both MPI libraries and without eager buffers",
    "ranks(*numbers)": "of tests/mpi, run on these numbers of ranks",
    "once": "says nothing of the MPI library, so to run it with one of them is enough",
    "long": "run by --long only: another case of a promise that an everyday test holds",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long tier, too, and all of tests/mpi on 1 to 4 ranks")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tier, and tests that start launchers from a rank."""
    # Ranks that a plain process has started are told which tests to run.
    if not config.option.long and launcher.PLAN not in os.environ:
        long = [item for item in items if item.get_closest_marker("long")]
        if long:
            config.hook.pytest_deselected(items=long)
            items[:] = [item for item in items if not item.get_closest_marker("long")]
    if UNDER_LAUNCHER:
        skip = pytest.mark.skip(reason="starts mpiexec itself, so it is run from a plain pytest, not under mpiexec")
        for item in items:
            if not {config.rootpath / "tests" / folder for folder in ("launch", "with_torch")}.isdisjoint(
                item.path.parents
            ):
                item.add_marker(skip)
