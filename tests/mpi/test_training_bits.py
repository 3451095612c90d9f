"""What decides the last bits goes with a checkpoint: installed again where it can be, and said where it cannot."""

from __future__ import annotations

import json

import pytest

import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.distributed.groups import default_group
from mpiddp.training import Config, bits
from mpiddp.training.keeper import Keeper
from mpiddp.training.together import together

from .test_training_resume import BATCH, make

RING = ((plan.ANY_SIZE, "ring"),)


@pytest.fixture
def link(world):
    """The link of all ranks, whose table is put back."""
    link = default_group().link
    before = plan.table_of(link)
    yield link
    plan.install(before, link)


def saved(tmp_path, world):
    config = Config(output=tmp_path, resume="auto", batch_size=BATCH, seed=4)
    trainer, _ = make()
    keeper = Keeper(config, first=world.rank == 0)
    keeper.save(trainer)
    together(keeper.finish)
    return config


def resumed(config, world, caplog):
    """Resume, and return what was said of differences."""
    trainer, _ = make()
    Keeper(config, first=world.rank == 0).resume(trainer)
    return [text for text in map(str, caplog.messages) if "the last bits of results may differ" in text]


def test_table_of_algorithms_is_installed_again(world, tmp_path, link, caplog):
    before = plan.table_of(link)
    plan.install({**before, "all_reduce": RING}, link)
    assert world.size == 1 or plan.table_of(link) != before
    config = saved(tmp_path, world)
    plan.install(before, link)  # another process, which has measured something else
    assert resumed(config, world, caplog) == []
    assert world.size == 1 or plan.name_of("all_reduce", link, 1) == "ring"
    assert world.size == 1 or plan.name_of("broadcast", link, 1) == "one_shot"


def test_what_the_user_asks_for_goes_before_and_is_said(world, tmp_path, link, caplog, monkeypatch):
    config = saved(tmp_path, world)
    monkeypatch.setenv("MPIDDP_ALGORITHM", "all_reduce:tree")
    plan.forget()
    try:
        said = resumed(config, world, caplog)
    finally:
        monkeypatch.undo()
        plan.forget()
    assert len(said) == (world.rank == 0 and world.size > 1)
    assert all(text.startswith("the algorithm of all_reduce was [[") and "[[None, 'tree']]" in text for text in said)


def test_of_another_number_of_ranks_nothing_is_installed(world, link):
    now = bits.what_decides_bits()
    then = json.loads(json.dumps(now)) | {"ranks": world.size + 1, "nodes": [0] * (world.size + 1)}
    then["algorithms"]["all_reduce"] = [[None, "ring"]]
    before = plan.table_of(link)
    bits.install(then)
    assert plan.table_of(link) == before
    assert list(bits.differences(then)) == [("ranks", world.size + 1, world.size)]


def test_differences_are_named(world):
    now = json.loads(json.dumps(bits.what_decides_bits()))
    assert list(bits.differences(now)) == []
    then = now | {"NumPy": "1.0", "BLAS threads": 7, "unknown to this version": 1}
    assert {name: was for name, was, _ in bits.differences(then)} == {"NumPy": "1.0", "BLAS threads": 7}
    assert list(bits.differences({"ranks": dist.get_world_size()})) == [], "of an older checkpoint"
