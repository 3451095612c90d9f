"""The pytest plugin of the ranks that gives each test its process group, and the fixture `world`."""

import contextlib
import gc
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.distributed import groups
from mpiddp.faults import watchdog
from mpiddp.mpi import requests
from mpiddp.shm.eager import EagerBuffers


@dataclass(frozen=True)
class World:
    """The ranks of the test, and random numbers that are the same on all of them."""

    rank: int
    size: int
    rng: np.random.Generator
    long: bool
    """The long tier runs."""


@pytest.fixture(scope="module", autouse=True)
def _what_was_there_stays() -> None:
    """Let a test's ``gc.collect()`` look at its module's objects only: with all tests and torch it takes half a second.

    Objects that are garbage by now are collected before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give every test the process group, and check that it leaves it unchanged."""
    ranks = request.config.pluginmanager.get_plugin("ranks")
    if ranks.last_failed and dist.is_initialized():
        # Pending messages of a failed test must not reach the next one.
        dist.destroy_process_group()
        ranks.use_up_communicator_ids()
    if not dist.is_initialized():
        dist.init_process_group()
    yield
    left = requests.pending
    end = time.monotonic() + 0.5
    while not requests.finished() and time.monotonic() < end:
        time.sleep(0.001)
    if requests.pending:
        ranks.give_up(f"{request.node.nodeid} left {requests.pending} operations that do not finish")
    assert left == 0, f"the test left {left} operations unfinished: wait for each Work"
    assert dist.is_initialized(), "the test destroyed the process group and did not initialise it again"


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Return rank, size, and ``rng``, seeded by the test's name."""
    rng = np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
    return World(dist.get_rank(), dist.get_world_size(), rng, request.config.option.long)


def everybody(value: Any) -> list[Any]:
    """Return every rank's value."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.fixture
def anew() -> Iterator[None]:
    """Make the default group anew afterwards, and end the groups that the test has made."""
    yield
    dist.destroy_process_group()
    dist.init_process_group()


@pytest.fixture
def alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks answer questions soon, which errors of a wait ask."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.02)


def forget_plans() -> None:
    """Read the settings anew."""
    plan.overrides.cache_clear()
    for group in groups._groups:
        group._plans.forget()
    plan.overrides()


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that sets variables, named without MPIDDP_, which plans depend on."""

    def variables(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"MPIDDP_{name}", value)
        forget_plans()

    yield variables
    monkeypatch.undo()
    forget_plans()


@pytest.fixture
def eager_buffers() -> None:
    """Skip a test where groups have none: of one rank, of several nodes, on processors that reorder stores."""
    if dist.group.WORLD._link.find(EagerBuffers) is None:
        pytest.skip("needs eager buffers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that all ranks know."""
    return Path(everybody(str(tmp_path))[0])


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Return a new group of all ranks, which a test may destroy."""
    made = dist.new_group()
    yield made
    with contextlib.suppress(ValueError):
        dist.destroy_process_group(made)
