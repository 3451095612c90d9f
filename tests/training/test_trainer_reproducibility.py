"""The surroundings of the last bits go with a checkpoint; a resumed run reports differences."""

from __future__ import annotations

import json

import pytest

import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.training import Config, info
from mpiddp.training.checkpointer import Checkpointer
from mpiddp.training.ranks import raise_on_all_ranks

from .test_checkpointer import BATCH, make

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


def saved(tmp_path, world):
    config = Config(output=tmp_path, resume="auto", batch_size=BATCH, seed=4)
    trainer, _ = make()
    checkpointer = Checkpointer(config)
    checkpointer.save(trainer)
    raise_on_all_ranks(checkpointer.finish)
    return config


def resumed(config, world, caplog):
    """Resume, and return the reported differences."""
    trainer, _ = make()
    Checkpointer(config).resume(trainer)
    return [text for text in map(str, caplog.messages) if "the last bits of results may differ" in text]


@pytest.fixture
def choose(monkeypatch):
    """Set ``MPIDDP_ALGORITHM``, as a job that is started anew may."""

    def choose(text):
        monkeypatch.setenv("MPIDDP_ALGORITHM", text)
        plan.forget()

    yield choose
    monkeypatch.undo()
    plan.forget()


def test_the_same_algorithms_are_nothing_to_say(world, tmp_path, caplog, choose):
    choose("reduce:tree, all_reduce:ring")
    config = saved(tmp_path, world)
    choose("all_reduce:ring,reduce:tree")
    assert resumed(config, world, caplog) == []


def test_other_algorithms_are_said_by_the_first_rank(world, tmp_path, caplog, choose):
    config = saved(tmp_path, world)
    choose("all_reduce:tree")
    said = resumed(config, world, caplog)
    assert len(said) == (world.rank == 0)
    assert all(text.startswith("MPIDDP_ALGORITHM was None and is all_reduce:tree") for text in said)


def test_a_deterministic_run_says_so(world, tmp_path, caplog, monkeypatch):
    config = saved(tmp_path, world)
    monkeypatch.setenv("MPIDDP_DETERMINISTIC", "1")
    said = resumed(config, world, caplog)
    assert len(said) == (world.rank == 0)
    assert all(text.startswith("MPIDDP_DETERMINISTIC was False and is True") for text in said)


def test_another_number_of_ranks_is_the_only_difference(world):
    then = json.loads(json.dumps(info.reproducibility()))
    then |= {"ranks": world.size + 1, "nodes": [0] * (world.size + 1)}
    assert list(info.differences(then)) == [("ranks", world.size + 1, world.size)]


def test_differences_are_named(world):
    now = json.loads(json.dumps(info.reproducibility()))
    assert list(info.differences(now)) == []
    then = now | {"NumPy": "1.0", "BLAS threads": 7, "unknown to this version": 1}
    assert {name: was for name, was, _ in info.differences(then)} == {"NumPy": "1.0", "BLAS threads": 7}
    assert list(info.differences({"ranks": dist.get_world_size()})) == [], "of an older checkpoint"
