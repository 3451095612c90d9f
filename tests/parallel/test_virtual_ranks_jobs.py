"""The same model on any number of ranks: ``train --virtual-ranks``. The long tier is the table of the documents."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import hosts
from harness.launcher import job, side_by_side

ROWS = {
    "mlp, SGD": ("--model", "mlp", "--lr", 0.02),
    "mlp, AdamW": ("--model", "mlp", "--optimizer", "adamw", "--lr", 0.002),
    "net, SGD": ("--model", "net", "--lr", 0.02),
    "net, AdamW": ("--model", "net", "--optimizer", "adamw", "--lr", 0.002),
    "resnet, AdamW": ("--model", "resnet", "--optimizer", "adamw", "--lr", 0.002, "--dropout", 0.2),
}
COMMON = ("--virtual-ranks", 8, "--batch-size", 100, "--clip-norm", 1, "--schedule", "cosine")

"""The last batch of an epoch has 38 samples: virtual ranks with 4 and with 5."""
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "3 ranks on 2 nodes": (3, {"MPIDDP_NODES": "0,1,1"}),
    "4 ranks": (4, {}),
    "8 ranks": (8, {}),
    "4 ranks on 2 nodes": (4, {"MPIDDP_NODES": "0,1,0,1"}),
    "3 ranks by ring": (3, {"MPIDDP_ALGORITHM": "all_reduce:ring"}),
    "3 ranks by MPI's own": (3, {"MPIDDP_ALGORITHM": "all_reduce:native", "MPIDDP_EAGER": "0"}),
}


def train(output: Path, row: str, ranks: int, *options: object, **env: Any) -> tuple[str, str]:
    """Return the hash of the model, and the losses."""
    words = (*ROWS[row], *COMMON, "--epochs", 3, *options, "--output", output)
    done = job("-m", "mpiddp", "train", *words, ranks=ranks, limit_s=120, **env)
    assert done.rc == 0, done
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = repr([(each["loss"], each["test_loss"], each["accuracy"]) for each in lines])
    assert len(lines) == 3, lines
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest(), losses


def resumed(output: Path, row: str) -> tuple[str, str]:
    """Train on 2 ranks, and again on 3 from a checkpoint in the middle of the second epoch."""
    train(output, row, 2, "--checkpoint-steps", 4, "--keep", 20)
    for folder in (output / "checkpoints").iterdir():
        if int(folder.name.partition("-")[2]) > 20:
            shutil.rmtree(folder)
    return train(output, row, 3, "--resume", "auto")


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row == "net, AdamW" else pytest.mark.long) for row in ROWS]
)
def test_model_and_metrics_have_the_same_bits_on_any_number_of_ranks(tmp_path, request, row):
    long = request.config.getoption("long")
    ways = WAYS if long else {name: WAYS[name] for name in ("1 rank", "3 ranks on 2 nodes")}
    jobs = {
        name: partial(train, tmp_path / str(index), row, ranks, **env)
        for index, (name, (ranks, env)) in enumerate(ways.items())
    }
    jobs["resumed"] = partial(resumed, tmp_path / "resumed", row)
    with contextlib.ExitStack() as stack:
        if long and hosts.why_not() is None:
            on = stack.enter_context(hosts.Hosts(2)).cyclic
            jobs["4 ranks on 2 hosts"] = partial(train, tmp_path / "hosts", row, 4, on=on)
        futures = stack.enter_context(side_by_side(jobs, places=2))
        found = {name: future.result() for name, future in futures.items()}
    assert len(set(found.values())) == 1, found
