"""``kill -9`` at random moments, again and again: the resumed run ends with the same bits.

``MPIDDP_TEST_KILLS=20 python -m pytest tests/training/test_checkpoint_jobs.py --long -s`` kills twenty times;
``MPIDDP_TEST_SEED`` repeats a choice of victims and moments.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from harness.launcher import PROGRAMS, Program, start

KILLS = int(os.environ.get("MPIDDP_TEST_KILLS", "1"))
SEED = int(os.environ.get("MPIDDP_TEST_SEED", time.time_ns() % 2**32))
RANKS = 2
VICTIMS = ("one rank", "rank 0", "all ranks", "the launcher")
MOMENTS = ("any", "while a checkpoint is written")

RUNS = {
    "one writer": (),
    # The rank that has them writes shards of the optimizer and the compression's remainder.
    "every rank writes": ("--zero", "--optimizer", "adamw", "--average", "models:compressed"),
}


def train(run: str, output: Path) -> Program:
    options = ["--epochs", 1 + KILLS, "--checkpoint-steps", 2, "--batch-size", 128, "--output", output, *RUNS[run]]
    return start("-m", "mpiddp", "train", *options, "--resume", "auto", ranks=RANKS, search=[PROGRAMS])


def kill(job: Program, victim: str, rng: np.random.Generator) -> None:
    match victim:
        case "one rank":
            chosen = [int(rng.choice(job.ranks()))]
        case "rank 0":
            chosen = [job.rank_0()]
        case "all ranks":
            chosen = job.ranks()
        case _:
            chosen = [job.pid]
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def being_written(output: Path) -> list[str]:
    return [path.name for path in output.glob("checkpoints/.step-*.tmp")]


def newest_step(output: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in output.glob("checkpoints/step-*")), default=0)


def wait_for_moment(job: Program, output: Path, step: int, moment: str) -> None:
    while job.poll() is None and newest_step(output) < step:
        time.sleep(0.005)
    while moment != "any" and job.poll() is None and not being_written(output):
        time.sleep(0.0002)


def parameters(output: Path) -> dict[str, bytes]:
    return {n: x.tobytes() for n, x in safetensors.numpy.load_file(output / "model.safetensors").items()}


def epochs(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def finish(run: str, output: Path) -> str:
    with train(run, output) as job:
        done = job.wait(180)
    assert done.rc == 0, done
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
def test_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path, run):
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "killed"
    finish(run, undisturbed)
    last_step = newest_step(undisturbed)
    rng = np.random.default_rng([SEED, *run.encode()])
    victims = np.resize(rng.permutation(VICTIMS), KILLS).tolist()
    moments = rng.permutation(np.resize(MOMENTS, KILLS)).tolist()
    hits: Counter[str] = Counter()
    steps = [0]
    for victim, moment in zip(victims, moments, strict=True):
        # The remaining kills share the remaining steps.
        furthest = 2 * (last_step - steps[-1]) // (KILLS - len(steps) + 3)
        with train(run, output) as job:
            wait_for_moment(job, output, steps[-1] + 1 + int(rng.integers(furthest)), moment)
            if moment == "any":
                time.sleep(float(rng.uniform(0, 0.02)))
            assert job.poll() is None, (f"seed {SEED}: ended before it was killed", job.output)
            kill(job, victim, rng)
            done = job.wait(60)
        assert done.rc != 0, (f"seed {SEED}: {victim} was killed", done)
        hits[victim] += 1
        hits["left half a checkpoint"] += bool(being_written(output))
        steps.append(newest_step(output))
    said = finish(run, output)
    print(f"\n{run}: seed {SEED}: {KILLS} kills, {dict(hits)}, newest checkpoints {steps[1:]} of {last_step} steps")
    assert f"resumed after step {steps[-1]}, " in said
    assert parameters(output) == parameters(undisturbed), f"seed {SEED}"
    losses, expected = ([each["loss"] for each in epochs(folder)] for folder in (output, undisturbed))
    assert losses == expected, f"seed {SEED}"
    assert not being_written(output), "what dead writers have left is removed"
