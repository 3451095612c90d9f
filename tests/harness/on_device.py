"""CuPy arrays in tests: the fake device for a module, MPI that takes its addresses, expected reductions."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from harness.faking import fake_gpu
from harness.inputs import OPS, Op, means_something, thinned
from mpiddp.algorithms.gpu import ring as device_ring, staged_ring, staged_two_shot, table as device_table
from mpiddp.mpi import p2p_device
from mpiddp.mpi.cuda_aware import DevicePointers


def renew() -> None:
    """Make the default group anew: then the ranks agree on what MPI can do."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group()


@pytest.fixture(scope="module", autouse=True)
def cupy() -> Iterator[Any]:
    """Put the fake device in the place of CuPy, and let arrays of a few KB be long ones."""
    with pytest.MonkeyPatch.context() as patch, fake_gpu() as fake, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks .* share one GPU")
        patch.setattr(staged_ring, "PART_BYTES", 1 << 10)
        patch.setattr(staged_two_shot, "NODE_BYTES", 1 << 13)
        patch.setattr(staged_two_shot, "SHORTEST_BYTES", 1 << 9)
        patch.setattr(device_ring, "PART_BYTES", 1 << 11)
        patch.setattr(device_table, "SHORT_BYTES", 256)
        renew()
        yield fake
        dist.destroy_process_group()


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[DevicePointers]:
    """Let MPI take addresses of the device, which are the host's."""
    monkeypatch.setenv("MPIDDP_CUDA_AWARE", "1")
    renew()
    assert device_table.addresses.point_to_point.yes and p2p_device.by_address
    yield device_table.addresses
    monkeypatch.undo()
    renew()
    assert not p2p_device.by_address


def reductions(world: Any, dtype: np.dtype[Any]) -> Iterator[tuple[Op, int]]:
    """Yield the reductions that mean something on a dtype, on one length, and two of them on lengths of all kinds."""
    lengths = thinned(world, dtype, (0, 1, world.size - 1, world.size + 1, 1511), 1)
    every = [*((op, 127) for op in OPS), *itertools.product((Op.SUM, OPS[-1]), lengths)]
    return (each for each in every if means_something(each[0], dtype))
