"""Steps of training on teams of ranks."""

import json

import pytest

from mpiddp.bench import train
from mpiddp.training.config import UsageError

from .test_bench import here, options

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

__all__ = ["here"]  # a fixture


def test_train_shares_the_strong_batch_and_multiplies_the_weak_one(here, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(train, "NETWORKS", {"mlp": train.NETWORKS["mlp"]})
    file = here.comm.bcast(tmp_path) / "train.json"
    given = ("train", "--strong-batch", "9", "--weak-batch", "3", "-n", "2", "--json", str(file))
    assert train.run(options(*given)) == 0
    if here.rank == 0:
        rows = json.loads(file.read_text())["rows"]
        teams = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4]}[here.size]
        expected = [("strong", team, 9 // team) for team in teams] + [("weak", team, 3) for team in teams]
        assert [(row["scaling"], row["ranks"], row["batch"]) for row in rows] == expected
        for row in rows:
            assert row["samples_per_s"] == pytest.approx(row["batch"] * row["ranks"] / row["step_s"])
            alone = rows[0 if row["scaling"] == "strong" else len(teams)]
            assert row["efficiency"] == pytest.approx(row["samples_per_s"] / alone["samples_per_s"] / row["ranks"])


@pytest.mark.mpi(min_size=2)
def test_train_needs_a_sample_for_each_rank(here):
    with pytest.raises(UsageError, match="--strong-batch 1"):
        train.run(options("train", "--strong-batch", "1"))
