"""Files of a run are whole after every epoch, console and logs survive a full disk, a folder has one run at a time."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.launcher import Program

from mpiddp.training import outputs as outputs_module
from mpiddp.training.metrics import EpochMetrics
from mpiddp.training.outputs import Console, JsonLines, Outputs, RankLog, RunLock, TensorBoardEvents, say


def metrics(epoch: int, loss: float = 0.5, accuracy: float | None = 0.25) -> EpochMetrics:
    return EpochMetrics(
        epoch=epoch,
        loss=loss,
        accuracy=accuracy,
        samples_per_s=10.0,
        comm_exposed=0.1,
        epoch_s=2.0,
        test_loss=None if accuracy is None else 0.75,
        test_s=0.1,
        lr=0.01,
    )


def json_epochs(path):
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()]


def scalars(folder, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return [(each.step, each.value) for each in events.Scalars(tag)]


def test_json_lines_are_complete_after_every_line(tmp_path):
    path = tmp_path / "new" / "m.jsonl"
    file = JsonLines(path)
    file.write(metrics(1))
    first = json.loads(path.read_text())
    assert (first["epoch"], first["loss"], first["accuracy"]) == (1, 0.5, 0.25)
    assert {"samples_per_s", "comm_exposed", "epoch_s", "lr", "test_loss"} <= set(first)
    file.write(metrics(2))
    file.close()
    assert json_epochs(path) == [1, 2]


def test_outputs_begin_with_the_history_of_a_resumed_run(tmp_path):
    for history in ([], [metrics(1)]):
        outputs = Outputs(tmp_path / "extra.jsonl", tmp_path / "out", history)
        for epoch in (2, 3):
            outputs.epoch_end(SimpleNamespace(history=[*history, *map(metrics, range(2, epoch + 1))]))
        outputs.close()
    assert json_epochs(tmp_path / "extra.jsonl") == json_epochs(tmp_path / "out" / "metrics.jsonl") == [1, 2, 3]


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


def test_tensorboard_needs_nothing_else(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    for name in ("torch", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    TensorBoardEvents(tmp_path).close()


def test_without_tensorboard_the_others_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    Outputs(None, tmp_path, [metrics(1)]).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_costs_a_line_and_not_the_run(tmp_path, caplog):
    full = tmp_path / "m.jsonl"
    full.symlink_to("/dev/full")
    outputs = Outputs(full, tmp_path / "out")
    outputs.epoch_end(SimpleNamespace(history=[metrics(1)], epoch=1))
    assert "epoch 1 is missing in a JsonLines (" in caplog.text and "No space left" in caplog.text
    outputs.close()
    assert json_epochs(tmp_path / "out" / "metrics.jsonl") == [1]


class Full(io.StringIO):
    """On a full disk, as one that buffers shows it."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_behind_stdout_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        print("a line", flush=True)
    say("a line")


@pytest.mark.parametrize(("batches", "accumulate", "steps"), [(7, 1, 7), (7, 3, 3), (6, 3, 2), (1, 9, 1)])
def test_the_bar_counts_steps(monkeypatch: pytest.MonkeyPatch, batches: int, accumulate: int, steps: int) -> None:
    shown: dict[str, Any] = {}
    monkeypatch.setattr(outputs_module, "tqdm", lambda **options: shown.update(options))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer: Any = SimpleNamespace(skipped=0, epoch=2, train_loader=range(batches), accumulate=accumulate)
    Console(epochs=5).epoch_begin(trainer)
    assert (shown["total"], shown["desc"]) == (steps, "epoch 3")


def test_warnings_go_to_stderr_with_the_rank(capsys):
    with RankLog(2, 4):
        logging.getLogger("somebody").warning("look %s", "here")
        logging.getLogger("somebody").info("no matter")
        warnings.warn("of Python", stacklevel=1)
    logging.getLogger("somebody").warning("afterwards")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[rank")]
    assert said[0] == "[rank 2/4] warning: look here"
    assert len(said) == 2 and said[1].startswith("[rank 2/4] warning: ") and "UserWarning: of Python" in said[1]


def test_file_has_everything_and_grows(tmp_path, capsys):
    for attempt in (1, 2):
        with pytest.raises(ZeroDivisionError), RankLog(1, 2, tmp_path / "logs"):
            logging.getLogger("somebody").info("attempt %d", attempt)
            raise ZeroDivisionError("boom")
    text = (tmp_path / "logs" / "rank-1.log").read_text()
    assert text.index("attempt 1") < text.index("ZeroDivisionError: boom") < text.index("attempt 2")
    assert all("[rank 1/2] " in line for line in text.splitlines() if "attempt" in line or "process" in line)
    assert "attempt" not in capsys.readouterr().err


def test_logging_is_put_back(tmp_path):
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    with RankLog(0, 1, tmp_path):
        assert root.level == logging.INFO
    assert (root.level, root.handlers) == before


def test_a_full_disk_costs_lines_and_says_nothing(tmp_path, capsys):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    with RankLog(0, 2, tmp_path):
        logging.getLogger("somebody").info("a line")
        assert not capsys.readouterr().err
        file = logging.getLogger().handlers[-1]
        try:
            raise ValueError("no error of the system's")
        except ValueError:
            file.handleError(logging.makeLogRecord({"msg": "a line"}))
    assert "Logging error" in capsys.readouterr().err, "what is the program's own fault is told"


OWNER = """
import sys, time
from pathlib import Path
from mpiddp.training.outputs import RunLock
held = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_another_process_is_refused_until_the_first_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "_PATIENCE_S", 0.2)
    with Program([sys.executable, "-c", OWNER, str(tmp_path / "run")], {"SLURM_JOB_ID": "4711"}) as owner:
        owner.wait_for("held")
        for _ in range(2):
            said = rf"in use by another run, process {owner.pid} on \S+, Slurm job 4711: wait"
            with pytest.raises(BlockingIOError, match=said):
                RunLock(tmp_path / "run")
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
    mine = RunLock(tmp_path / "run")
    assert (tmp_path / "run" / "lock").read_text().startswith(f"process {os.getpid()} on ")
    with pytest.raises(BlockingIOError):
        RunLock(tmp_path / "run")
    mine.release()
    RunLock(tmp_path / "run").release()


def test_one_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunLock(tmp_path)
    monkeypatch.setattr(outputs_module.time, "sleep", lambda _: first.release())
    RunLock(tmp_path).release()


def test_a_file_system_without_locks_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        RunLock(tmp_path / "file" / "run")
