"""MPIDDP_DEBUG: the log."""

import inspect
import logging

import numpy as np
import pytest
from harness.inputs import finish

import mpiddp as dist
from mpiddp.distributed import debug

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3), pytest.mark.core]


@pytest.fixture
def level():
    handlers = list(debug.logger.handlers)
    debug.configure("INFO")
    yield
    debug.configure("OFF")
    debug.logger.setLevel(logging.NOTSET)
    debug.logger.handlers[:] = handlers


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


def test_the_environment_sets_the_level_and_nonsense_is_an_error(world, monkeypatch):
    dist.destroy_process_group()
    monkeypatch.setenv("MPIDDP_DEBUG", "info")
    dist.init_process_group()
    assert debug.on
    dist.destroy_process_group()
    monkeypatch.setenv("MPIDDP_DEBUG", "detail")
    with pytest.raises(ValueError, match="must be OFF or INFO, and calls are always compared; got 'DETAIL'"):
        dist.init_process_group()
    monkeypatch.delenv("MPIDDP_DEBUG")
    with monkeypatch.context() as wrong, pytest.raises(ValueError, match="MPIDDP_DETERMINISTIC must be 0 or 1"):
        wrong.setenv("MPIDDP_DETERMINISTIC", "true")
        dist.init_process_group()
    dist.init_process_group()
    assert not debug.on
    debug.logger.handlers.clear()
    debug.logger.setLevel(logging.NOTSET)
