"""Messages between the ranks' watchdogs: who hears them, and what is left of them at the end."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpiddp.errors import MismatchError
from mpiddp.faults import liveness
from mpiddp.faults.liveness import Liveness, Tag
from mpiddp.mpi import lazy


class Group:
    id, sequence, closed = 9, 0, False

    def __init__(self) -> None:
        self.told: list[Exception] = []
        self.monitor = SimpleNamespace(be_told=self.told.append)


def test_a_destroyed_group_is_forgotten() -> None:
    comm: Any = SimpleNamespace(rank=0, size=2)
    world: Any = SimpleNamespace(thread_multiple=True)
    one, link = Liveness(comm, world, raises=True), Group()
    message = 9, MismatchError("rank 1 calls another", [0, 1])
    one.register(link)  # type: ignore[arg-type]
    one.handlers[Tag.ERROR](1, message)
    one.retire(link)  # type: ignore[arg-type]
    one.handlers[Tag.ERROR](1, message)
    assert [(type(each), str(each)) for each in link.told] == [(MismatchError, "rank 1 calls another")]
    one.register(link)  # type: ignore[arg-type]
    link.closed = True  # it has no ranks, as while it is being made
    assert one.known() == [link] and not one.links()
    del link
    one.handlers[Tag.ERROR](1, message)
    assert not one.known()


@pytest.mark.mpi
def test_ranks_part_with_messages_on_their_way_or_keep_the_memory_of_what_nobody_takes(world):
    for together in (True, False):
        comm = lazy.MPI.Intracomm(lazy.MPI.COMM_WORLD.Dup())
        one, text = Liveness(comm, SimpleNamespace(thread_multiple=True), raises=True), b"x" * (1 << 20)
        for rank in one.awaited(None):
            one.send(rank, Tag.RUN_OVER, text)
        if together:
            assert one.part() and not one._sent and comm == lazy.MPI.COMM_NULL
        else:
            sent = [request for request, _ in one._sent]
            one.leave()
            del one
            assert all(any(each is request for each, *_ in liveness._kept[-1]) for request in sent)
    lazy.MPI.COMM_WORLD.Barrier()
