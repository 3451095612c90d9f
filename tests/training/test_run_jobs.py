"""The folder of a run: one job at a time, damage that is reported, and data that cannot be trained on."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from harness.launcher import Completed, job, start

pytestmark = pytest.mark.once
FIRST = ("--model", "mlp", "--epochs", "1", "--batch-size", "512")


TRAIN = ("-m", "mpiddp", "train")


def error_of(done: Completed) -> str:
    assert done.rc == 2 and "Traceback" not in done.stderr, done
    (said,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert said.startswith("mpiddp: error: "), done
    return said


def test_a_second_job_does_not_touch_the_first_ones_folder(tmp_path):
    with start(*TRAIN, "--model", "mlp", "--epochs", "5000", "--output", tmp_path) as first:
        first.wait_for("epoch    2/5000")
        before = (tmp_path / "run.json").read_bytes()
        said = error_of(job(*TRAIN, *FIRST, "--output", tmp_path, "--resume", "auto", ranks=2))
        assert f"{tmp_path} is in use by another run, process {first.pid} on " in said
        assert (tmp_path / "run.json").read_bytes() == before
        first.signal(signal.SIGUSR1)
        done = first.wait(60)
    assert done.rc == 75, done


def test_a_run_none_of_whose_checkpoints_is_whole_does_not_begin_anew(tmp_path):
    assert job(*TRAIN, *FIRST, "--output", tmp_path, ranks=2).rc == 0
    (damaged,) = tmp_path.glob("checkpoints/step-*/arrays.safetensors")
    damaged.write_bytes(b"")
    said = error_of(job(*TRAIN, *FIRST, "--output", tmp_path, "--resume", "auto", ranks=2))
    assert f"no checkpoint in {tmp_path}/checkpoints is whole" in said and f"{damaged} has 0 bytes" in said


def test_images_that_do_not_fit_end_the_job_with_the_error_of_the_first_step(tmp_path):
    np.savez(tmp_path / "small.npz", x=np.zeros((20, 8, 8), np.uint8), y=np.arange(20) % 10)
    done = job(*TRAIN, "--data", f"npz:{tmp_path}/small.npz", ranks=2)
    assert done.rc == 1 and "Kernel size can't be greater than actual input size" in done.stderr, done
