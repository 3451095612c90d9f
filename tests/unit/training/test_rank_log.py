"""Logging with the rank in front, and a file for each rank."""

from __future__ import annotations

import logging
import warnings

import pytest

from mpiddp.training.rank_log import RankLog


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
