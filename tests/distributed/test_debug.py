"""MPIDDP_DEBUG: the log, ranks that disagree, buffers touched too early."""

from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest
from harness.inputs import Op, finish

import mpiddp as dist
from mpiddp.distributed import debug

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def level(request):
    handlers = list(debug.logger.handlers)
    debug.configure(getattr(request, "param", "DETAIL"))
    yield
    debug.configure("OFF")
    debug.logger.setLevel(logging.NOTSET)
    debug.logger.handlers[:] = handlers


@pytest.mark.parametrize("level", ["INFO", "DETAIL"], indirect=True)
def test_every_operation_is_logged(world, level, caplog):
    x = np.ones(3, np.float32)
    with caplog.at_level(logging.INFO, "mpiddp"):
        here = f"{__file__}:{inspect.currentframe().f_lineno + 1}"
        dist.all_reduce(x, async_op=True).wait()
        works = [dist.irecv(x, world.rank), dist.isend(x.copy(), world.rank)]
        finish(works)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith(f"[rank {world.rank}] all_reduce #")
    assert "of float32 (3,) in the group" in lines[0]
    assert lines[0].endswith(here)
    assert "irecv of float32" in lines[1]
    assert "isend of float32" in lines[2]


def test_nothing_is_logged_when_it_is_off(world, caplog):
    with caplog.at_level(logging.INFO, "mpiddp"):
        dist.all_reduce(np.ones(1))
    assert not caplog.records


CALLS = {
    "operation": (lambda x: dist.all_reduce(x), lambda x: dist.broadcast(x, 0), "all_reduce #", "broadcast #"),
    "barrier": (lambda x: dist.all_reduce(x), lambda x: dist.barrier(), "all_reduce #", "barrier #"),
    "shape": (lambda x: dist.all_reduce(x), lambda x: dist.all_reduce(x[:2].copy()), r"\(4,\)", r"\(2,\)"),
    "order of shape": (
        lambda x: dist.all_reduce(x.reshape(4, 1)),
        lambda x: dist.all_reduce(x.reshape(1, 4)),
        r"\(4, 1\)",
        r"\(1, 4\)",
    ),
    "shape by an algorithm": (
        lambda x: dist.all_reduce(x, algorithm="ring"),
        lambda x: dist.all_reduce(x.reshape(2, 2), algorithm="ring"),
        r"all_reduce by ring #\d+ of 4 float64 elements .*\(4,\)",
        r"all_reduce by ring #\d+ of 4 float64 elements .*\(2, 2\)",
    ),
    "list": (
        lambda x: dist.all_gather([x[:1].copy() for _ in range(dist.get_world_size())], x[:1].copy()),
        lambda x: dist.all_gather([x.copy() for _ in range(dist.get_world_size())], x),
        r"all_gather #\d+ of \d+ float64 elements",
        r"all_gather #\d+ of \d+ float64 elements",
    ),
    "layout": (
        lambda x: dist.all_reduce_coalesced([x, x[:2].copy()]),
        lambda x: dist.all_reduce_coalesced([x[:2].copy(), x]),
        r"all_reduce_coalesced #.*, sizes \[4, 2\]",
        r"all_reduce_coalesced #.*, sizes \[2, 4\]",
    ),
    "dtype": (lambda x: dist.all_reduce(x), lambda x: dist.all_reduce(x.astype(np.float32)), "float64", "float32"),
    "reduction": (lambda x: dist.all_reduce(x), lambda x: dist.all_reduce(x, Op.MAX), "with SUM", "with MAX"),
    "root": (
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.broadcast(x, 1),
        "group rank 0 as root",
        "group rank 1 as root",
    ),
    "object": (
        lambda x: dist.broadcast_object_list([1], 0),
        lambda x: dist.all_gather_object([None] * 4, 1),
        "broadcast_object_list",
        "all_gather_object",
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(world, level, name):
    call, other, first, second = CALLS[name]
    odd = world.size - 1
    with pytest.raises(
        dist.MismatchError,
        match=rf"rank 0 calls .*{first}.*test_debug.py:\d+, rank {odd} calls .*{second}.*test_debug.py:\d+;",
    ):
        (other if world.rank == odd else call)(np.ones(4))
    x = np.ones(2)
    dist.all_reduce(x)
    assert (x == world.size).all()


def test_what_may_differ(world, level):
    x = np.ones(3)
    dist.all_reduce(x, Op.PREMUL_SUM(float(world.rank)))
    assert (x == sum(range(world.size))).all()
    outputs = [np.zeros(rank) for rank in range(world.size)]
    dist.all_gather(outputs, np.full(world.rank, float(world.rank)))
    assert all((output == rank).all() for rank, output in enumerate(outputs))
    dist.gather(x, [np.zeros(3) for _ in range(world.size)] if world.rank == 0 else None)
    dist.scatter(x, [np.full(3, rank) + 0.0 for rank in range(world.size)] if world.rank == 0 else None)
    assert (x == world.rank).all()


TOUCHES = {
    "all_reduce": lambda x, y, group: dist.all_reduce(x, group=group, async_op=True),
    "all_reduce in two steps": lambda x, y, group: dist.all_reduce(x, Op.MAX, group=group, async_op=True),
    "all_reduce by an algorithm": lambda x, y, group: dist.all_reduce(x, group=group, async_op=True, algorithm="ring"),
    "broadcast": lambda x, y, group: dist.broadcast(x, 0, group=group, async_op=True),
    "reduce": lambda x, y, group: dist.reduce(x, 0, group=group, async_op=True),
    "all_gather": lambda x, y, group: dist.all_gather(list(y), x, group=group, async_op=True),
    "all_gather_single": lambda x, y, group: dist.all_gather_single(y, x, group=group, async_op=True),
    "isend": lambda x, y, group: dist.isend(x, dist.get_rank(), group=group),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_touching_a_buffer_before_wait(world, level, name):
    for touch in (True, False):
        x, y = np.full(5, 1.0), np.zeros((world.size, 5))
        got = dist.irecv(np.zeros(5), world.rank) if name == "isend" else None
        submitted = TOUCHES[name](x, y, None)
        if touch:
            x[3] = 7
            with pytest.raises(dist.ArrayError, match=r"(?s)submitted at .*test_debug.py:\d+, was changed before"):
                submitted.wait()
        else:
            submitted.wait()
            x[3] = 8
            assert submitted.wait()
        if got is not None:
            got.wait()
    dist.barrier()


def test_touching_after_completion_was_seen_is_right(world, level):
    x = np.ones(5)
    submitted = dist.all_reduce(x, async_op=True)
    while not submitted.is_completed():
        pass
    x += 1
    assert submitted.wait()
    y = np.ones(5)
    submitted = dist.all_reduce(y, async_op=True)
    half = submitted.get_future().then(lambda future: np.divide(y, 2, out=y))
    half.wait()
    submitted.wait()
    assert (y == world.size / 2).all()


def test_the_environment_sets_the_level_and_nonsense_is_an_error(world, monkeypatch):
    dist.destroy_process_group()
    monkeypatch.setenv("MPIDDP_DEBUG", "detail")
    dist.init_process_group()
    assert (debug.on, debug.detail) == (True, True)
    dist.destroy_process_group()
    monkeypatch.setenv("MPIDDP_DEBUG", "LOUD")
    with pytest.raises(ValueError, match="OFF, INFO or DETAIL"):
        dist.init_process_group()
    monkeypatch.delenv("MPIDDP_DEBUG")
    with monkeypatch.context() as wrong, pytest.raises(ValueError, match="MPIDDP_DETERMINISTIC must be 0 or 1"):
        wrong.setenv("MPIDDP_DETERMINISTIC", "true")
        dist.init_process_group()
    dist.init_process_group()
    assert (debug.on, debug.detail) == (False, False)
    debug.logger.handlers.clear()
    debug.logger.setLevel(logging.NOTSET)
