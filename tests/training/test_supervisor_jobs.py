"""``python -m mpiddp run``: a job that ends badly is started again, until it ends well or gets no further."""

import json
import os
import re
import signal
import sys

import pytest
from harness import hosts, launcher
from harness.launcher import Program, job, start

RUN = [sys.executable, "-m", "mpiddp", "run"]


def supervised(tmp_path, event: str, *options: str) -> Program:
    return start("steps", tmp_path, event, ranks=2, before=[*RUN, *options, "--"], cwd=tmp_path)


def expect_failed(done: launcher.Completed, starts: int, said: str) -> None:
    assert done.rc not in (0, launcher.TIMED_OUT), str(done)
    assert done.stderr.count("mpiddp run: start") == starts, str(done)
    assert said in done.stderr


def expect_complete(done: launcher.Completed, starts: int = 2) -> None:
    assert done.rc == 0, str(done)
    assert done.stdout.split("sum")[-1].split() == ["100.0"] * 3, str(done)  # of s and s + 1, for s below 10
    assert done.stderr.count("mpiddp run: start") == starts, str(done)
    steps = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step")]
    # Open MPI's mpirun continues a stopped rank before it ends it, which may make steps that are not printed any more.
    assert steps == sorted(set(steps)) and steps[:5] == [1, 2, 3, 4, 5], str(done)


@pytest.mark.core
@pytest.mark.parametrize("event", ["kill", "leave", pytest.param("raise", marks=pytest.mark.long)])
def test_job_that_ends_badly_goes_on_from_its_last_state(tmp_path, event):
    with supervised(tmp_path, event) as job:
        expect_complete(job.wait(60))
    assert not list(tmp_path.glob(".mpiddp-run-*"))


@pytest.mark.core
def test_job_whose_rank_0_shows_no_life_is_ended_and_started_again(tmp_path):
    with supervised(tmp_path, "stop", "--lost-after", "4") as job:
        expect_complete(done := job.wait(60))
    assert "showed no life any more and was ended" in done.stderr


def test_restarts_without_progress_are_given_up(tmp_path):
    with supervised(tmp_path, "always", "--restarts", "9", "--watch", str(tmp_path / "saved")) as job:
        expect_failed(job.wait(60), 3, "given up: 2 restarts in a row without progress")


@pytest.mark.core
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signal_ends_the_job_and_no_other_is_started(tmp_path, number):
    with supervised(tmp_path, "wait") as job:
        job.wait_for("waits")
        job.signal(number)
        done = job.wait(30)
        assert not job.members()
    expect_failed(done, 1, "it is not started again")


@pytest.mark.core
def test_train_that_is_killed_and_stopped_resumes_to_the_bits_of_an_undisturbed_run(tmp_path):
    """Every rank writes shards: its part of the optimizer's state, and the compression's remainder."""
    shards = ("--zero", "--optimizer", "adamw", "--average", "models:compressed")
    options = ("--epochs", 5, "--batch-size", 128, "--checkpoint-steps", 3, *shards, "--output")
    train, how = ("-m", "mpiddp", "train", *options), {"ranks": 2, "search": [launcher.PROGRAMS], "cwd": tmp_path}
    with start(*train, "disturbed", before=[*RUN, "--"], **how) as supervised:
        supervised.wait_for("epoch 1/5")
        os.kill(supervised.rank_0(), signal.SIGKILL)
        supervised.wait_for("resumed after step", 60)
        supervised.signal(signal.SIGUSR1)
        stopped = supervised.wait(90)
    assert stopped.rc == 75 and "start 2 of at most 4: " in stopped.stderr, stopped
    assert "--resume auto" in stopped.stderr and "start 3" not in stopped.stderr, stopped
    assert len(re.findall(r"SIGUSR1 on rank 0: stopped after step \d+, saved a checkpoint", stopped.stdout)) == 1
    resumed = job(*train, "disturbed", "--resume", "auto", **how)
    assert resumed.rc == 0 and resumed.stdout.count("resumed after step") == 1, resumed
    assert job(*train, "whole", **how).rc == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("disturbed", "whole")]
    assert models[0] == models[1]
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("disturbed", "whole")]
    losses = [[json.loads(line)["loss"] for line in each] for each in lines]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert (tmp_path / "whole/checkpoints/step-0000000057.safetensors").is_file(), "of 60, none at the end of an epoch"


@pytest.mark.long
@pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
@pytest.mark.parametrize("loss", ["crash", "cut"])
def test_lost_node(tmp_path, loss):
    """A crash ends all that runs on the host; a cut leaves it running, out of reach, until the network is mended."""
    before = ["env", "-C", tmp_path, *RUN, "--lost-after", "15", "--"]  # the marker is made in the working directory
    with (
        hosts.Hosts(2) as two,
        start("steps", tmp_path, "network", ranks=2, before=before, on=two.block, MPIDDP_TIMEOUT="8") as job,
    ):
        job.wait_for("waits")
        two.lose("h2", crash=loss == "crash")
        job.wait_for("start 2 of at most 4", 90)
        two.mend("h2")
        done = job.wait(90)
    assert done.rc == 0, str(done)
    assert done.stdout.split("sum")[-1].split() == ["100.0"] * 3, str(done)
