"""The same model on any number of ranks: ``train --virtual-ranks``. The long tier is the table of the documents.

A row of the table is a model with an optimizer, trained on the digits for 3 epochs in every one of the `WAYS`. All have
dropout, clipping, a schedule, and a last batch of 38 samples.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import pytest
from harness import hosts
from harness.launcher import PROGRAMS, ULFM, is_open_mpi, job, side_by_side
from harness.tiers import thinned

ROWS = {
    "mlp, SGD": ("--model", "mlp", "--lr", 0.02),
    "mlp, AdamW": ("--model", "mlp", "--optimizer", "adamw", "--lr", 0.002),
    "net, SGD": ("--model", "net", "--lr", 0.02),
    "net, AdamW": ("--model", "net", "--optimizer", "adamw", "--lr", 0.002),
    "resnet, AdamW": ("--model", "resnet", "--optimizer", "adamw", "--lr", 0.002, "--dropout", 0.2),
}
_COMMON = ("--virtual-ranks", 8, "--batch-size", 100, "--clip-norm", 1, "--schedule", "cosine", "--epochs", 3)
_STEP = "mpiddp.training.trainer:Trainer"
_UPDATED = "after mpiddp.optim:Optimizer.zero_grad"


class Way(NamedTuple):
    """How a job runs."""

    ranks: int
    env: Mapping[str, str] = MappingProxyType({})
    on: str = ""
    """The placement on two hosts (network namespaces): block or cyclic."""
    resumed_on: int | None = None
    """The number of ranks that go on from a checkpoint in the middle of the second epoch."""
    victims: str = ""
    """Ranks that are killed, as tests/programs/lethal_train.py takes them; an epoch has 15 steps."""
    spares: int = 0


WAYS = {
    **{f"{ranks} on a node": Way(ranks) for ranks in (1, 2, 3, 4, 8)},
    **{
        f"{nodes.count(',') + 1} on nodes {nodes}": Way(nodes.count(",") + 1, {"MPIDDP_NODES": nodes})
        for nodes in ("0,1", "0,0,1", "0,1,0,1", "0,0,0,0,1,1,1,1")
    },
    **{f"{ranks} on two hosts, block": Way(ranks, on="block") for ranks in (2, 3, 8)},
    "4 on two hosts, cyclic": Way(4, on="cyclic"),
    **{f"{ranks} by ring": Way(ranks, {"MPIDDP_ALGORITHM": "all_reduce:ring"}) for ranks in (3, 8)},
    **{
        f"{ranks} by MPI's own": Way(ranks, {"MPIDDP_ALGORITHM": "all_reduce:native", "MPIDDP_EAGER": "0"})
        for ranks in (3, 8)
    },
    "4 on nodes 0,0,1,1 by MPI's own": Way(4, {"MPIDDP_ALGORITHM": "all_reduce:native", "MPIDDP_NODES": "0,0,1,1"}),
    **{f"{first}, resumed on {then}": Way(first, resumed_on=then) for first, then in ((2, 3), (8, 1), (3, 4))},
    "4, rank 0 killed in the first step": Way(4, victims=f"0 before {_STEP}._backward 1"),
    "4, rank 1 killed after the last step": Way(4, victims=f"1 {_UPDATED} 45"),
    "4 on nodes 0,0,1,1, rank 0 killed while it writes a checkpoint": Way(
        4, {"MPIDDP_NODES": "0,0,1,1"}, victims="0 after mpiddp.serialization:encode_arrays 2"
    ),
    "8, ranks 0, 5 and 2 killed": Way(
        8,
        victims=f"0 before {_STEP}._backward 10,5 before {_STEP}._make_step 20,2 {_UPDATED} 40",
    ),
    "3 and a spare, rank 1 killed": Way(4, victims=f"1 before {_STEP}._backward 40", spares=1),
}


def runs_here(way):
    """Return True if this machine and MPI library can run a job so: only Open MPI's mpirun lets ranks live on."""
    return not (way.victims and not is_open_mpi()) and not (way.on and hosts.why_not())


def _train(output, row, way, on, ranks, *options):
    """Return the hashes of the model, and of losses and accuracies."""
    words = [*ROWS[row], *_COMMON, *options, "--spares", way.spares, "--output", output]
    how = {"ranks": ranks, "on": on, "limit_s": 300, "search": [PROGRAMS], "VICTIMS": way.victims}
    done = job("lethal_train", *words, **how, options=ULFM if way.victims else (), **way.env)
    took_over = done.stderr.count("going on after step") + done.stderr.count("beginning anew")
    died = len(way.victims.split(",")) if way.victims else 0
    assert done.rc == 0 and took_over == died, (row, way, took_over, str(done))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    results = repr([[each[name] for name in ("epoch", "loss", "test_loss", "accuracy")] for each in lines]).encode()
    model = (output / "model.safetensors").read_bytes()
    return hashlib.sha256(model).hexdigest(), hashlib.sha256(results).hexdigest()


def _in_one_way(output, row, way, on):
    if way.resumed_on is None:
        return _train(output, row, way, on, way.ranks)
    _train(output, row, way, on, way.ranks, "--checkpoint-steps", 4, "--keep", 20)
    for path in (output / "checkpoints").iterdir():
        if int(path.stem.partition("-")[2]) > 20:
            path.unlink()
    return _train(output, row, way, on, way.resumed_on, "--resume", "auto")


EVERYDAY = ("3 on nodes 0,0,1", "2, resumed on 3")


# test_virtual_ranks.py asks both MPI libraries for the bits
@pytest.mark.parametrize("row", thinned(ROWS, "net, AdamW"))
def test_model_and_metrics_have_the_same_bits_on_any_number_of_ranks(tmp_path, request, row):
    names = WAYS if request.config.getoption("long") else EVERYDAY
    ways = {name: WAYS[name] for name in names if runs_here(WAYS[name])}
    with contextlib.ExitStack() as stack:
        two = stack.enter_context(hosts.Hosts(2)) if any(way.on for way in ways.values()) else None
        jobs = {
            name: partial(_in_one_way, tmp_path / str(index), row, way, getattr(two, way.on) if way.on else None)
            for index, (name, way) in enumerate(ways.items())
        }
        futures = stack.enter_context(side_by_side(jobs, places=2))
        found = {name: future.result() for name, future in futures.items()}
    assert len(set(found.values())) == 1, found
