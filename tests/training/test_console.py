"""The console survives a full disk, counts steps, and says whose a warning is."""

import errno
import io
import logging
import sys
import warnings

import pytest

from mpiddp.training.console import say, warnings_of


class Full(io.StringIO):
    """On a full disk, as one that buffers shows it."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_behind_stdout_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        print("a line", flush=True)
    say("a line")


def test_warnings_go_to_stderr_with_the_rank(capsys):
    with warnings_of(2, 4):
        logging.getLogger("somebody").warning("look %s", "here")
        logging.getLogger("somebody").info("no matter")
        warnings.warn("of Python", stacklevel=1)
    logging.getLogger("somebody").warning("afterwards")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[rank")]
    assert said[0] == "[rank 2/4] warning: look here"
    assert len(said) == 2 and said[1].startswith("[rank 2/4] warning: ") and "UserWarning: of Python" in said[1]
