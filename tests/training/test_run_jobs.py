"""The folder of a run has one job at a time."""

import signal

from harness.launcher import job, start

TRAIN = ("-m", "mpiddp", "train", "--model", "mlp", "--epochs", "5000")


def test_a_second_job_does_not_touch_the_first_ones_folder(tmp_path):
    with start(*TRAIN, "--output", tmp_path) as first:
        first.wait_for("epoch    2/5000")
        before = (tmp_path / "run.json").read_bytes()
        refused = job(*TRAIN, "--output", tmp_path, "--resume", "auto")
        assert refused.rc == 2 and "Traceback" not in refused.stderr and refused.stderr.count("error") == 1, refused
        assert f"mpiddp: error: {tmp_path} is in use by another run, process {first.pid} on " in refused.stderr
        assert (tmp_path / "run.json").read_bytes() == before
        first.signal(signal.SIGUSR1)
        done = first.wait(60)
    assert done.rc == 75, done
