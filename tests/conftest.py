"""Chooses what pytest is here: a rank under a launcher, or the plain process that starts the ranks."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from harness import launcher
from harness.faking import fake_gpu

UNDER_LAUNCHER = launcher.announced_size() > 0 or launcher.PLAN in os.environ

# harness.ranks starts MPI when it is imported, which the plain process must never do.
pytest_plugins = ["harness.ranks", "harness.world"] if UNDER_LAUNCHER else ["harness.parent"]

MARKS = {
    "launch": "starts jobs itself",
    "core": "depends on MPI or its launcher: `.ci/run` runs it with both libraries; an mpi test runs on 1 to 4 ranks",
    "ranks(*numbers)": "an mpi test that runs on these numbers of ranks",
    "alone": "not written in tests: the harness adds it to an mpi test's run on one rank, which needs one core only",
    "long": "runs only with --long: one more case of a promise that an everyday test checks",
}
"""``mpi``, which runs under mpiexec, is pytest-mpi's own; a test with neither runs in this process."""
LAUNCH = {"with_torch", "gpu"}
"""Folders whose tests start jobs, as those in files named ``..._jobs`` do."""


@pytest.fixture
def cupy() -> Iterator[Any]:
    """Let ``import cupy`` be the fake: two devices, which do their work late."""
    with fake_gpu() as module:
        yield module


@pytest.fixture
def waits(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the host's waits for the device are added."""
    found: list[str] = []

    def note(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args, **how: found.append(name) or original(*args, **how))

    note(cupy.ndarray, "get", "get")
    for owner in (cupy.cuda.Stream, cupy.cuda.Event, cupy.cuda.Device):
        note(owner, "synchronize", f"synchronize of {owner.__name__}")
    return found


@pytest.fixture
def torch() -> Any:
    """Return torch, or skip the test."""
    return pytest.importorskip("torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long tier, too, and all mpi tests on 1 to 4 ranks")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent.name in LAUNCH or item.path.stem.endswith("_jobs"):
        item.add_marker("launch")
        item.add_marker(pytest.mark.skipif(launcher.mpiexec() is None, reason=launcher.NO_MPIEXEC))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tier, and on a rank what is not for ranks."""
    # Ranks that a plain process has started are told which tests to run.
    every_tier = config.option.long or launcher.PLAN in os.environ

    def runs_here(item: pytest.Item) -> bool:
        for_ranks = item.get_closest_marker("mpi") is not None or not UNDER_LAUNCHER
        return for_ranks and (every_tier or item.get_closest_marker("long") is None)

    config.hook.pytest_deselected(items=[item for item in items if not runs_here(item)])
    items[:] = filter(runs_here, items)
