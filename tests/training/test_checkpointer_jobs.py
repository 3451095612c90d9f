"""A run stopped twice in the middle of an epoch goes on with fewer ranks, loses nothing, and learns."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from harness import launcher

SAMPLES, BATCH, EPOCHS = 1437, 64, 20
STEPS_AN_EPOCH = 23


def run(ranks: int, folder: Path, stop_at: int) -> launcher.Completed:
    """Train to the end, or for ``stop_at`` steps if positive."""
    options = ["--output", str(folder / "out"), "--resume", "auto", "--epochs", str(EPOCHS)]
    return launcher.job("noted", folder, stop_at, *options, ranks=ranks, limit_s=180)


def batches(folder: Path, ranks: int) -> list[list[int]]:
    files = [(folder / f"{ranks}-{rank}").read_text().splitlines() for rank in range(ranks)]
    return [[index for share in shares for index in json.loads(share)] for shares in zip(*files, strict=True)]


@pytest.mark.long
def test_digits_reach_97_percent_with_4_then_3_then_2_ranks(tmp_path):
    for ranks, steps in ((4, 100), (3, 137)):
        stopped = run(ranks, tmp_path, steps)
        assert stopped.rc == 75 and f"SIGUSR1 on rank {ranks - 1}" in stopped.stdout, stopped
    done = run(2, tmp_path, -1)
    assert done.rc == 0, done
    assert "resumed after step 237, in epoch 11" in done.stdout and "ranks was 3 and is 2" in done.stderr, done

    made = batches(tmp_path, 4) + batches(tmp_path, 3) + batches(tmp_path, 2)
    assert len(made) == EPOCHS * STEPS_AN_EPOCH
    for epoch in range(EPOCHS):
        steps = made[epoch * STEPS_AN_EPOCH : (epoch + 1) * STEPS_AN_EPOCH]
        taken = Counter(index for step in steps for index in step)
        assert taken == Counter(range(SAMPLES)), f"epoch {epoch + 1} has lost or repeated samples"
        assert [len(step) for step in steps] == [BATCH] * (STEPS_AN_EPOCH - 1) + [SAMPLES % BATCH]

    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [each["epoch"] for each in metrics] == list(range(1, EPOCHS + 1))
    # As of the run that is never stopped: dropout moves the last percent.
    accuracies = [each["accuracy"] for each in metrics]
    assert max(accuracies) >= 0.97 and accuracies[-1] >= 0.96, accuracies
    assert re.search(r"^saved ", done.stdout, re.MULTILINE), done
