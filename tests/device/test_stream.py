"""Streams, marks, pinned memory and the choice of a device, on the fake one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mpiddp import device
from mpiddp.device import choice, place, stream
from mpiddp.mpi.message import as_array


def test_a_device_that_has_failed_reaches_no_mark(cupy: Any) -> None:
    reached = stream.ready(cupy.zeros(5))
    cupy.cuda.runtime.failed = 700
    for ask in (reached.Test, reached.Wait):
        with pytest.raises(RuntimeError, match="IllegalAddress"):
            ask()
    cupy.cuda.runtime.failed = 0
    reached.Wait()


def test_steps_under_a_stream(cupy: Any) -> None:
    x = cupy.zeros(5)
    side, before, seen = stream.side("add", x), place.current_stream(0), []

    def steps() -> Iterator[str]:
        for _ in range(2):
            seen.append(cupy.cuda.get_current_stream())
            yield "waits"
        return "end"

    def whole() -> Iterator[str]:
        seen.append((yield from stream.under(side, steps())))  # type: ignore[arg-type]

    for each in whole():
        assert each == "waits" and cupy.cuda.get_current_stream() == before
    assert seen == [side, side, "end"]


def test_what_is_moved_keeps_its_shape(cupy: Any) -> None:
    for shape in ((), (3,), (2, 0), (4, 5)):
        x = cupy.asarray(np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)) + 1
        copy = place.moved(x, 1)
        assert copy.shape == shape and copy.device.id == 1
        assert (place.moved(copy, None) == x.get()).all()


def test_a_default_stream_of_each_thread(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy._late, "PER_THREAD", True)
    x = cupy.zeros(5)
    assert place.current_stream(0).ptr == 2, "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: place.current_stream(0) is not cupy.cuda.get_current_stream()).result() is False
        assert pool.submit(place.current_stream, 0).result() is not place.current_stream(0)
    x += 1
    side = stream.after("add", x)
    with stream.on(side):
        x *= 3
    stream.hold(x, stream.mark(side))
    x += 1
    stream.ready(x).Wait()
    assert (x._host == 4).all()


def test_a_cupy_that_is_too_old(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy, "__version__", "13.6.0")
    choice.cuda_fault.cache_clear()
    assert device.cuda_fault() == "this is CuPy 13.6.0, and mpiddp needs 14 or later: upgrade it"
    with pytest.raises(TypeError, match=r"sum cannot take an array on a GPU as `x`: this is CuPy 13\.6\.0, and"):
        as_array(cupy.zeros(5), "sum", name="x")


def test_choice_by_local_rank(cupy: Any) -> None:
    choice.choose(5)
    assert device.current_device() == 5 % cupy.cuda.runtime.COUNT == cupy.cuda.runtime.getDevice()
    choice.choose(0)
    assert device.current_device() == 1, "the first choice stays"


def test_no_choice_for_a_program_that_works_already(cupy: Any) -> None:
    cupy.zeros(3)
    choice.choose(1)
    assert cupy.cuda.runtime.getDevice() == 0


def test_no_choice_after_the_program_has_chosen(cupy: Any) -> None:
    cupy.cuda.Device(1).use()
    choice.choose(0)
    assert cupy.cuda.runtime.getDevice() == 1
    device.set_device(0)
    choice.choose(1)
    assert device.current_device() == 0


def test_without_cupy_nothing_is_chosen() -> None:
    if device.cuda_fault() is None:
        pytest.skip("there is a GPU")
    choice.choose(1)
    assert device.current_device() == 0


def test_upload_gives_host_arrays_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("mpiddp.device.transfer.cuda_fault", lambda: "CuPy is not installed")
    x = np.ones(3)
    assert device.upload(x) is x
