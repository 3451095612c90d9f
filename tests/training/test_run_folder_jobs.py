from __future__ import annotations

import json

import pytest
from harness.launcher import job


@pytest.mark.once
def test_tensorboard_reads_what_a_run_has_written(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for epochs in ("1", "2"):
        options = ("--epochs", epochs, "--model", "mlp", "--output", tmp_path, "--resume", "auto")
        done = job("-m", "mpiddp", "train", *options, ranks=2, limit_s=120)
        assert done.rc == 0, done
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("loss/train")] == [1, 2]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [each.value for each in events.Scalars("accuracy/test")]
    assert found == pytest.approx([line["accuracy"] for line in lines])
