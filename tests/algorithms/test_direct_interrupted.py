"""Ctrl-C in the middle of a long call, on a made-up rank: nothing is taken for complete, and nothing is freed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mpiddp.algorithms import one_shot
from mpiddp.errors import DistError
from mpiddp.faults.calls import make_call
from mpiddp.mpi import work
from mpiddp.mpi.requests import READY, Driven, Steps
from mpiddp.mpi.work import Work


def interrupted(*arrays: Any) -> Steps:
    yield READY
    raise KeyboardInterrupt


def test_second_look_is_an_error() -> None:
    driven, work = Driven(interrupted), Work(interrupted(), mock.Mock(), ())
    for first_look in (driven.Test, work._advance):
        with pytest.raises(KeyboardInterrupt):
            first_look()
    for look in (driven.Test, driven.Wait, work.wait):
        with pytest.raises(DistError, match="interrupted"):
            look()


def blocking(x: Any) -> tuple[Callable[[], object], list[Any]]:
    link: Any = mock.MagicMock(sequence=0)
    link.__getitem__.return_value.writable.side_effect = KeyboardInterrupt
    call = make_call(link, "all_reduce")
    shot = one_shot.OneShot(link, call, [one_shot.Shot([], None, one_shot.whole, None, None, None)])
    return lambda: shot.run((x,)), one_shot._abandoned


def asynchronous(x: Any) -> tuple[Callable[[], object], list[Any]]:
    operation: Any = mock.Mock()
    return Work(interrupted(x), operation, ())._advance, work._abandoned


@pytest.mark.parametrize("make", [blocking, asynchronous])
def test_arrays_of_a_call_are_kept(make: Any) -> None:
    x = np.ones(3)
    kept = weakref.ref(x)
    call, abandoned = make(x)
    with pytest.raises(KeyboardInterrupt):
        call()
    del x, call
    gc.collect()
    assert kept() is not None
    abandoned.clear()
    gc.collect()
    assert kept() is None
