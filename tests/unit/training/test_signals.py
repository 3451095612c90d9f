"""Signals become a flag, and only while asked for."""

from __future__ import annotations

import os
import signal

import pytest

from mpiddp.training.signals import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_is_remembered(number):
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop() and stop.number == number


def test_the_first_of_several_counts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGUSR1


@pytest.mark.parametrize("before", [[], [signal.SIGUSR1]])
def test_second_ctrl_c_interrupts(before):
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        for number in before:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back():
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopRequest():
        assert [signal.getsignal(each) for each in STOP_SIGNALS] != before
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
