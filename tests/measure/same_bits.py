"""Prints hashes of models trained on any number of ranks: ``python -m tests.measure.same_bits [PYTHON...]``.

A row of the table is a model with an optimizer, trained on the digits for 3 epochs by ``train --virtual-ranks 8`` in
every one of the `WAYS`, by each PYTHON (of environments with other MPI libraries; by default this one). All have
dropout, clipping, a schedule, and a last batch of 38 samples. The exit code is 1 if a row has more than one hash.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from harness import hosts
from harness.launcher import PROGRAMS, ULFM, is_open_mpi, job, side_by_side

ROWS = {
    "mlp, SGD": ("--model", "mlp", "--lr", 0.02),
    "mlp, AdamW": ("--model", "mlp", "--optimizer", "adamw", "--lr", 0.002),
    "net, SGD": ("--model", "net", "--lr", 0.02),
    "net, AdamW": ("--model", "net", "--optimizer", "adamw", "--lr", 0.002),
    "resnet, AdamW": ("--model", "resnet", "--optimizer", "adamw", "--lr", 0.002, "--dropout", 0.2),
}
_COMMON = ("--virtual-ranks", 8, "--batch-size", 100, "--clip-norm", 1, "--schedule", "cosine", "--epochs", 3)
_STEP = "mpiddp.training.train_step:TrainStep"


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
    **{f"{ranks} on two hosts, {on}": Way(ranks, on=on) for ranks, on in ((2, "block"), (3, "block"), (4, "cyclic"))},
    "8 on two hosts, block": Way(8, on="block"),
    **{f"{ranks} by ring": Way(ranks, {"MPIDDP_ALGORITHM": "all_reduce:ring"}) for ranks in (3, 8)},
    **{
        f"{ranks} by MPI's own": Way(ranks, {"MPIDDP_ALGORITHM": "all_reduce:native", "MPIDDP_EAGER": "0"})
        for ranks in (3, 8)
    },
    "4 on nodes 0,0,1,1 by MPI's own": Way(4, {"MPIDDP_ALGORITHM": "all_reduce:native", "MPIDDP_NODES": "0,0,1,1"}),
    **{f"{first}, resumed on {then}": Way(first, resumed_on=then) for first, then in ((2, 3), (8, 1), (3, 4))},
    "4, rank 0 killed in the first step": Way(4, victims=f"0 before {_STEP}._backward 1"),
    "4, rank 1 killed after the last step": Way(4, victims=f"1 after {_STEP}._update 45"),
    "4 on nodes 0,0,1,1, rank 0 killed while it writes a checkpoint": Way(
        4, {"MPIDDP_NODES": "0,0,1,1"}, victims="0 before mpiddp.training.checkpoint:sync_folder 2"
    ),
    "8, ranks 0, 5 and 2 killed": Way(
        8, victims=f"0 before {_STEP}._backward 10,5 before {_STEP}.step 20,2 after {_STEP}._update 40"
    ),
    "3 and a spare, rank 1 killed": Way(4, victims=f"1 before {_STEP}._backward 40", spares=1),
}


def why_not(way: Way) -> str | None:
    """Return why this machine or MPI library cannot run a job so."""
    if way.victims and not is_open_mpi():
        return "only Open MPI's mpirun lets ranks live on"
    return hosts.why_not() if way.on else None


def _train(output: Path, row: str, way: Way, on: Any, ranks: int, *options: object) -> tuple[str, str]:
    """Return the hashes of the model, and of losses and accuracies."""
    words: list[object] = [*ROWS[row], *_COMMON, *options, "--spares", way.spares, "--output", output]
    how: dict[str, Any] = {"ranks": ranks, "on": on, "limit_s": 300, "search": [PROGRAMS], "VICTIMS": way.victims}
    if way.victims:
        done = job("lethal_train", *words, **how, options=ULFM, **way.env)
    else:
        done = job("-m", "mpiddp", "train", *words, **how, **way.env)
    took_over = done.stderr.count("going on after step") + done.stderr.count("beginning anew")
    died = len(way.victims.split(",")) if way.victims else 0
    if done.rc != 0 or took_over != died:
        raise RuntimeError(f"{row}, {way}: {took_over} of {died} deaths survived: {done}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    results = repr([[each[name] for name in ("epoch", "loss", "test_loss", "accuracy")] for each in lines]).encode()
    model = (output / "model.safetensors").read_bytes()
    return hashlib.sha256(model).hexdigest(), hashlib.sha256(results).hexdigest()


def _in_one_way(output: Path, row: str, way: Way, on: Any) -> tuple[str, str]:
    if way.resumed_on is None:
        return _train(output, row, way, on, way.ranks)
    _train(output, row, way, on, way.ranks, "--checkpoint-steps", 4, "--keep", 20)
    for folder in (output / "checkpoints").iterdir():
        if int(folder.name.partition("-")[2]) > 20:
            shutil.rmtree(folder)
    return _train(output, row, way, on, way.resumed_on, "--resume", "auto")


def measure(row: str, names: Iterable[str], folder: Path) -> dict[str, tuple[str, str]]:
    """Return the hashes of a row in those ways that can be run here."""
    ways = {name: WAYS[name] for name in names if why_not(WAYS[name]) is None}
    with contextlib.ExitStack() as stack:
        two = stack.enter_context(hosts.Hosts(2)) if any(way.on for way in ways.values()) else None
        jobs = {
            name: partial(_in_one_way, folder / str(index), row, way, getattr(two, way.on) if way.on else None)
            for index, (name, way) in enumerate(ways.items())
        }
        futures = stack.enter_context(side_by_side(jobs, places=2))
        failures = {name: future.exception() for name, future in futures.items()}
        return {
            name: ("failed", str(failures[name])) if failures[name] else future.result()
            for name, future in futures.items()
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="of environments with an MPI library each")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", action="store_true", help="print all hashes of this environment")
    given = parser.parse_args()
    if given.json:
        with tempfile.TemporaryDirectory(prefix="mpiddp-same-bits-") as folder:
            found = {}
            for index, row in enumerate(given.rows):
                found[row] = measure(row, WAYS, Path(folder) / str(index))
                print(hosts.mpi_library(), row, found[row], file=sys.stderr, flush=True)
        print(json.dumps({"library": hosts.mpi_library(), "rows": found}))
        return 0
    words = ["-m", "tests.measure.same_bits", "--json", "--rows", *given.rows]
    running = [
        subprocess.Popen([python, *words], stdout=subprocess.PIPE) for python in given.pythons or [sys.executable]
    ]
    tables = [json.loads(each.communicate()[0]) for each in running]
    print("| model, optimizer | SHA-256 | " + " | ".join(f"jobs, {each['library']}" for each in tables) + " |")
    print("|---" * (2 + len(tables)) + "|")
    code = 0
    for row in given.rows:
        hashes = [tuple(pair) for each in tables for pair in each["rows"][row].values()]
        most = max(set(hashes), key=hashes.count)
        counts = []
        for each in tables:
            others = [name for name, pair in each["rows"][row].items() if tuple(pair) != most]
            code |= bool(others)
            counts.append(f"{len(each['rows'][row]) - len(others)}" + f", but not {'; '.join(others)}" * bool(others))
        print(f"| {row} | `{most[0][:16]}` | " + " | ".join(counts) + " |")
    for each in tables:
        print(f"\n{each['library']}: {'; '.join(each['rows'][given.rows[0]])}")
    return code


if __name__ == "__main__":
    sys.exit(main())
