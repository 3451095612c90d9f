"""The files of a run's metrics are whole after every epoch."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from mpiddp.training.metrics_files import MetricsFiles, TensorBoardEvents

from .test_metrics import metrics


def json_epochs(path):
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()]


def scalars(folder, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return [(each.step, each.value) for each in events.Scalars(tag)]


def test_json_lines_begin_with_the_history_of_a_resumed_run_and_are_complete_after_every_line(tmp_path):
    extra, own = tmp_path / "new" / "extra.jsonl", tmp_path / "out" / "metrics.jsonl"
    for history in ([], [metrics(1)]):
        outputs = MetricsFiles(extra, own.parent, history)
        for epoch in (2, 3):
            outputs.write([*history, *map(metrics, range(2, epoch + 1))])
            assert json_epochs(extra) == json_epochs(own) == [*(each.epoch for each in history), *range(2, epoch + 1)]
        outputs.close()
    assert json.loads(extra.read_text().splitlines()[0]) == dataclasses.asdict(metrics(1))


def test_tensorboard_shows_no_epoch_twice(tmp_path):
    pytest.importorskip("tensorboard")
    first = TensorBoardEvents(tmp_path, [metrics(1, 0.9)])  # the folder is new: it gets what came before
    for epoch in (2, 3, 4):
        first.write(metrics(epoch, 0.5))
    assert scalars(tmp_path, "loss/train") == [(1, pytest.approx(0.9)), (2, 0.5), (3, 0.5), (4, 0.5)]
    next(tmp_path.iterdir()).rename(tmp_path / "events.out.tfevents.0")  # as if it were of an earlier second
    resumed = TensorBoardEvents(tmp_path, [metrics(1, 0.9), metrics(2, 0.5)])
    resumed.write(metrics(3, 0.25))
    assert scalars(tmp_path, "loss/train") == [(1, pytest.approx(0.9)), (2, 0.5), (3, 0.25)]
    assert scalars(tmp_path, "loss/test")[-1] == (3, 0.75) and scalars(tmp_path, "lr/train")
    for each in (first, resumed):
        each.close()


def test_tensorboard_is_in_the_folder_of_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    outputs = MetricsFiles(None, tmp_path, [metrics(1)])
    outputs.write([metrics(1), metrics(2)])
    outputs.close()
    assert scalars(tmp_path / "tensorboard", "accuracy/test") == [(1, 0.25), (2, 0.25)]


def test_tensorboard_needs_nothing_else(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    for name in ("torch", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    TensorBoardEvents(tmp_path).close()


def test_without_tensorboard_the_others_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    MetricsFiles(None, tmp_path, [metrics(1)]).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_costs_a_line_and_not_the_run(tmp_path, caplog):
    full = tmp_path / "m.jsonl"
    full.symlink_to("/dev/full")
    outputs = MetricsFiles(full, tmp_path / "out")
    outputs.write([metrics(1)])
    assert "epoch 1 is missing in a file of metrics (" in caplog.text and "No space left" in caplog.text
    outputs.close()
    assert json_epochs(tmp_path / "out" / "metrics.jsonl") == [1]
