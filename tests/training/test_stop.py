import os
import signal
import time

import pytest

from mpiddp.training.config import Config, UsageError
from mpiddp.training.stop import STOP_SIGNALS, StopRequest, parse_duration, seconds_left


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5", 1.5), ("2:03", 123), ("100:00:01", 360_001), ("slurm", None)]
)
def test_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "-5", "1h", "1:2:3:4", ":30", "1:", "nan", "1e3"])
def test_what_is_no_duration_is_refused(text, tmp_path):
    with pytest.raises(UsageError, match="--max-time has to be"):
        parse_duration(text)
    with pytest.raises(UsageError, match="--max-time has to be"):
        Config(max_time=text, output=tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """Set by hand the time that goes on evenly; the clock on the wall is 500 s ahead."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0] + 500)
    return now


def stopping_at(end_s, margin_s):
    with StopRequest() as stop:
        stop.listen(end_s, margin_s)
    return stop


def test_it_is_due_when_the_longest_step_so_far_would_end_too_late(clock):
    due, asked = stopping_at(1100.0, margin_s=20), []
    for pause_s in (0, 10, 3, 3, 10, 10, 6, 10, 7, 0.9, 0.1, 3):
        clock[0] += pause_s
        asked.append((clock[0], due()))
    # Steps of up to 10 s: two more and the margin need 40 s.
    assert asked == [(time_s, time_s >= 1060) for time_s, _ in asked]
    assert [last for _, last in asked[-3:]] == [False, True, True]


def test_only_the_margin_is_known_at_first(clock):
    assert not stopping_at(1031.0, margin_s=30)()
    assert stopping_at(1030.0, margin_s=30)()


def test_slurms_end(clock, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1734")
    assert (seconds_left("slurm", began_s=900.0), seconds_left("2:00", began_s=900.0)) == (234, 20)
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(UsageError, match="SLURM_JOB_END_TIME"):
        seconds_left("slurm", began_s=900.0)


def test_a_clock_that_is_set_meanwhile_does_not_count(clock, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1600")
    stops = [stopping_at(clock[0] + seconds_left(said, began_s=1000.0), 20) for said in ("100", "slurm")]
    for wall in (1501.0, 9501.0, 10.0):
        clock[0] += 1
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        assert not any(stop() for stop in stops)
    clock[0] = 1080.0
    assert all(stop() for stop in stops)


def test_a_stop_request_says_why(clock):
    stop = stopping_at(1100.0, margin_s=20)
    assert not stop() and stop.reason is None
    clock[0] = 1090.0
    assert stop() and stop.reason == "--max-time" and stop.number == 0


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_is_remembered(number):
    with StopRequest() as stop:
        stop.listen()
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop() and stop.number == number


def test_the_first_of_several_counts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGUSR1


@pytest.mark.parametrize("before", [[], [signal.SIGUSR1]])
def test_second_ctrl_c_interrupts(before):
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        stop.listen()
        for number in before:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back():
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopRequest() as stop:
        assert sum(signal.getsignal(each) != was for each, was in zip(STOP_SIGNALS, before, strict=True)) == 1
        stop.listen()
        assert all(signal.getsignal(each) != was for each, was in zip(STOP_SIGNALS, before, strict=True))
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
