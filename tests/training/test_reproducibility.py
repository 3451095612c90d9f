"""The surroundings of the last bits go with a checkpoint; a resumed run reports differences."""

import json

import pytest

import mpiddp as dist
from mpiddp.training import reproducibility
from mpiddp.training.checkpointer import Checkpointer

from .test_checkpointer import make, save

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"ALGORITHM": "reduce:tree, all_reduce:ring"}, {"ALGORITHM": "all_reduce:ring,reduce:tree"}, []),
        ({}, {"ALGORITHM": "all_reduce:tree"}, ["MPIDDP_ALGORITHM was None and is all_reduce:tree"]),
        ({}, {"DETERMINISTIC": "1"}, ["MPIDDP_DETERMINISTIC was False and is True"]),
    ],
)
def test_other_algorithms_are_said_by_the_first_rank(world, tmp_path, caplog, choose, before, now, said):
    choose(**before)
    trainer, config = make(output=tmp_path, resume="auto")
    save(trainer, config)
    choose(**now)
    Checkpointer(config).resume(trainer)
    found = [text for text in caplog.messages if "the last bits of results may differ" in text]
    assert len(found) == len(said) * (world.rank == 0)
    assert all(text.startswith(each) for text, each in zip(found, said, strict=world.rank == 0))


def test_differences_are_named(world):
    now = json.loads(json.dumps(reproducibility.current()))
    assert list(reproducibility.differences(now)) == []
    changed = {"NumPy": "1.0", "BLAS threads": 7, "MPI library": "another", "machine": "another"}
    then = now | changed | {"unknown to this version": 1}
    assert {name: was for name, was, _ in reproducibility.differences(then)} == changed
    then = now | {"ranks": world.size + 1, "nodes": [0] * (world.size + 1)}
    assert list(reproducibility.differences(then)) == [("ranks", world.size + 1, world.size)], "and not the nodes"
    assert list(reproducibility.differences({"ranks": dist.get_world_size()})) == [], "of an older checkpoint"
