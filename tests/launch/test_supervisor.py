"""``python -m mpiddp run``: a job that ends badly is started again, until it ends well or gets no further."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import safetensors.numpy
from harness import launcher
from harness.launcher import Program

from launch import hosts
from launch.test_kills import rank_0_of, ranks_of

RUN = [sys.executable, "-m", "mpiddp", "run"]

# Ten steps, saved one by one; in the first start something happens after the fifth.
STEPS = """
import os, pathlib, signal, subprocess, sys, time
import numpy as np
import mpiddp as dist

folder, event = pathlib.Path(sys.argv[1]), sys.argv[2]
dist.init_process_group()
me = dist.get_rank()
state = dist.load(folder / "state") if (folder / "state").exists() else {"step": 0, "sum": np.zeros(3)}
again = (folder / "again").exists()
dist.barrier()
while state["step"] < 10:
    if event == "always" and state["step"] == 5 and me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.full(3, state["step"] + me, np.float64)
    dist.all_reduce(x)
    state = {"step": state["step"] + 1, "sum": state["sum"] + x}
    if me == 0:
        dist.save(state, folder / "state")
        print("step", state["step"], flush=True)
    dist.barrier()
    if state["step"] == 5 and not again:
        if me == 0:
            (folder / "again").touch()
        dist.barrier()
        if event == "raise" and me == 0:
            raise RuntimeError("not today")
        if event == "kill" and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "leave":
            if me == 0:  # a job of its own, which ends well
                code = "import mpiddp; mpiddp.init_process_group()"
                subprocess.run([sys.executable, "-c", code], env=dist.settings.outside_of_jobs(), check=True)
            dist.barrier()
            if me == 1:
                os._exit(0)
        if event == "stop" and me == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        if event in ("wait", "network"):
            print("waits", flush=True)
            time.sleep(60 if event == "wait" else 3)
if me == 0:
    print("sum", *state["sum"], flush=True)
"""


def supervised(tmp_path, event: str, *options: str) -> Program:
    (tmp_path / "steps.py").write_text(STEPS)
    words = [*RUN, *options, "--", *launcher.launch(2), sys.executable, tmp_path / "steps.py", tmp_path, event]
    return Program(words, cwd=tmp_path)


def expect_complete(done: launcher.Completed, starts: int = 2) -> None:
    assert done.rc == 0, str(done)
    assert done.stdout.split("sum")[-1].split() == ["100.0"] * 3, str(done)  # of s and s + 1, for s below 10
    assert done.stderr.count("mpiddp run: start") == starts, str(done)
    steps = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step")]
    # Open MPI's mpirun continues a stopped rank before it ends it, which may make steps that are not printed any more.
    assert steps == sorted(set(steps)) and steps[:5] == [1, 2, 3, 4, 5], str(done)


@pytest.mark.parametrize("event", ["kill", "leave", pytest.param("raise", marks=pytest.mark.long)])
def test_job_that_ends_badly_goes_on_from_its_last_state(tmp_path, event):
    with supervised(tmp_path, event) as job:
        expect_complete(job.wait(60))
    assert not list(tmp_path.glob(".mpiddp-run-*"))


def test_job_whose_rank_0_shows_no_life_is_ended_and_started_again(tmp_path):
    with supervised(tmp_path, "stop", "--lost-after", "4") as job:
        done = job.wait(60)
    expect_complete(done)
    assert "showed no life any more and was ended" in done.stderr


@pytest.mark.once
def test_restarts_without_progress_are_given_up(tmp_path):
    with supervised(tmp_path, "always", "--restarts", "9", "--watch", str(tmp_path / "saved")) as job:
        done = job.wait(60)
    assert done.rc not in (0, launcher.TIMED_OUT), str(done)
    assert done.stderr.count("mpiddp run: start") == 3, str(done)
    assert "given up: 2 restarts in a row without progress" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signal_ends_the_job_and_no_other_is_started(tmp_path, number):
    with supervised(tmp_path, "wait") as job:
        job.wait_for("waits")
        job.signal(number)
        done = job.wait(30)
        assert not job.members()
    assert done.rc not in (0, launcher.TIMED_OUT), str(done)
    assert done.stderr.count("mpiddp run: start") == 1, str(done)
    assert "it is not started again" in done.stderr


def test_train_resumes_to_the_bits_of_an_undisturbed_run(tmp_path):
    def words(output: str) -> list[object]:
        options = ["--epochs", "6", "--batch-size", "128", "--checkpoint-steps", "2", "--output", output]
        return [*launcher.launch(2), sys.executable, "-m", "mpiddp", "train", *options]

    with Program([*RUN, "--", *words("killed")], cwd=tmp_path) as job:
        job.wait_for("epoch 2/6")
        os.kill(rank_0_of(job, ranks_of(job)), signal.SIGKILL)
        done = job.wait(90)
    assert done.rc == 0, str(done)
    assert "start 2 of at most 4: " in done.stderr
    assert "--resume auto" in done.stderr
    with Program(words("whole"), cwd=tmp_path) as job:
        assert job.wait(60).rc == 0
    models = [safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole")]
    assert models[0].keys() == models[1].keys()
    assert all(models[0][name].tobytes() == models[1][name].tobytes() for name in models[0])


@pytest.mark.once
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--restarts", "-1", "--", "true"], "--restarts has to be at least 0, got -1"),
        (["--lost-after", "0", "--", "true"], "--lost-after has to be positive"),
        (["--", "mpirun", "python", "-m", "mpiddp", "train"], "train needs --output DIR"),
        (["--", "no-such-launcher"], "no-such-launcher cannot be started"),
        (["--", "true"], "no rank of it has written the marker"),
    ],
)
def test_command_that_cannot_be_supervised_is_refused(tmp_path, words, said):
    with Program([*RUN, *words], cwd=tmp_path) as job:
        done = job.wait(30)
    assert done.rc in (1, 2), str(done)
    assert said in done.stderr
    assert done.stderr.count("start ") <= 1, str(done)


@pytest.mark.long
@pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
@pytest.mark.parametrize("loss", ["crash", "cut"])
def test_lost_node(tmp_path, loss):
    """A crash ends all that runs on the host; a cut leaves it running, out of reach, until the network is mended."""
    (tmp_path / "steps.py").write_text(STEPS)
    command = [sys.executable, tmp_path / "steps.py", tmp_path, "network"]
    before = ["env", "-C", tmp_path, *RUN, "--lost-after", "15", "--"]  # the marker is made in the working directory
    with hosts.Hosts(2) as two, two.start(2, command, before=before, env={"MPIDDP_TIMEOUT": "8"}) as job:
        job.wait_for("waits")
        two.lose("h2", crash=loss == "crash")
        job.wait_for("start 2 of at most 4", 90)
        two.mend("h2")
        done = job.wait(90)
    assert done.rc == 0, str(done)
    assert done.stdout.split("sum")[-1].split() == ["100.0"] * 3, str(done)
