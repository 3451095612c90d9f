"""Ctrl-C in the middle of a long call, on a made-up rank: nothing is taken for complete, and nothing is freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mpiddp.algorithms import one_shot
from mpiddp.errors import DistError
from mpiddp.faults.calls import make_record
from mpiddp.mpi import work
from mpiddp.mpi.requests import READY, Driven, Steps
from mpiddp.mpi.work import Work


def interrupted(*arrays: Any) -> Steps:
    yield READY
    raise KeyboardInterrupt


def test_second_look_is_an_error() -> None:
    driven = Driven(interrupted)
    with pytest.raises(KeyboardInterrupt):
        driven.Test()
    for look in (driven.Test, driven.Wait):
        with pytest.raises(DistError, match="interrupted"):
            look()


class Interrupting:
    def writable(self) -> bool:
        raise KeyboardInterrupt


def test_arrays_of_a_blocking_call_are_kept() -> None:
    link: Any = mock.MagicMock(sequence=0, __getitem__=lambda *_: Interrupting())
    call: Any = mock.Mock(record=make_record("all_reduce"))
    shot = one_shot.OneShot(link, call, [one_shot.Shot([], None, one_shot.whole, None, None, None)])
    x = np.ones(3)
    kept = weakref.ref(x)
    with pytest.raises(KeyboardInterrupt):
        shot.run((x,))
    del x
    gc.collect()
    assert kept() is not None
    one_shot._abandoned.clear()
    gc.collect()
    assert kept() is None


def test_arrays_of_an_asynchronous_call_are_kept() -> None:
    x = np.ones(3)
    kept = weakref.ref(x)
    operation: Any = mock.Mock()
    pending = Work(interrupted(x), operation, ())
    with pytest.raises(KeyboardInterrupt):
        pending._advance()
    del x, pending
    gc.collect()
    assert kept() is not None
    work._abandoned.clear()
    gc.collect()
    assert kept() is None
