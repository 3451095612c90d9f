"""Arrays with more elements than MPI can count, represented by a small pretended limit."""

import itertools
from functools import partial

import numpy as np
import pytest
from distributed import test_objects as objects, test_p2p as p2p
from faults import test_calls
from harness.collectives import COLLECTIVES, REDUCTIONS, check
from harness.inputs import OPS, both_ways

from mpiddp.mpi import message

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.core]


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch):
    monkeypatch.setattr(message, "MAX_COUNT", 40)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(world, name):
    """Most of the shapes are longer than the limit then."""
    dtypes, shapes = ["float32", "int64", "float16", "int8"], [(40,), (41,), (100,), (3, 39)]
    for dtype, shape, how in itertools.product(dtypes, shapes, both_ways()):
        check(world, name, np.dtype(dtype), shape, how)
    for op in OPS if name in REDUCTIONS else ():
        check(world, name, np.dtype("float32"), (100,), op=op)


MESSAGES = [partial(p2p.test_wrong_message_is_an_error_and_the_next_is_right, way=way) for way in ("recv", "irecv")]
MESSAGES.append(p2p.test_random_messages)
OBJECTS = [objects.test_all_gather_object, objects.test_gather_object, objects.test_broadcast_object_list]


@pytest.mark.parametrize("test", [*MESSAGES, *OBJECTS, objects.test_scatter_object_list])
def test_messages(world, test):
    test(world)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("expected", [10, 30, 20])  # the first is as long as a piece of what is sent
def test_block_that_does_not_fit(world, monkeypatch, expected):
    test_calls.test_blocks_of_another_size_than_expected(world, monkeypatch, (60, expected), "pieces")
