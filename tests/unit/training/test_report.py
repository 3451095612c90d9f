"""What a person sees: as long as somebody reads it."""

from __future__ import annotations

import errno
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mpiddp.training import report
from mpiddp.training.report import Console, say


class Full(io.StringIO):
    """A file on a full disk, as one that buffers shows it."""

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
    monkeypatch.setattr(report, "tqdm", lambda **options: shown.update(options))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer: Any = SimpleNamespace(skipped=0, epoch=2, train_loader=range(batches), accumulate=accumulate)
    Console(epochs=5).epoch_begin(trainer)
    assert (shown["total"], shown["desc"]) == (steps, "epoch 3")
