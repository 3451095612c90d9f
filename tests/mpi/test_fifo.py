"""FIFOs: the order of messages that go by them and by MPI, and messages that a Ctrl-C meets."""

import numpy as np
import pytest
from harness.inputs import finish

import mpiddp as dist
from mpiddp.mpi.p2p import Message

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3), pytest.mark.usefixtures("eager_buffers")]


def test_bursts_keep_their_order_and_the_fifo_is_used_again(world):
    """More messages than slots, some too long for one, into buffers that may be longer, by all kinds of receives."""
    group, ways = dist.new_group(), np.random.default_rng(world.rank)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for burst in world.rng.integers(1, 100, 12):
        sizes = world.rng.choice([0, 1, 10, 1000, 3000, 20_000], burst)
        works = [dist.isend(np.full(size, number, np.int32), right, group) for number, size in enumerate(sizes)]
        for number, size in enumerate(sizes):
            x = np.full(size + ways.integers(2), -1, np.int32)
            source = None if ways.random() < 0.3 else left
            if ways.random() < 0.5:
                assert dist.recv(x, source, group) == left
            else:
                work = dist.irecv(x, source, group)
                assert work.wait() and (work.source_rank(), work.count()) == (left, size)
            assert (x[:size] == number).all() and (x[size:] == -1).all()
        finish(works)
        dist.barrier(group)
        assert group._mailbox._transport._to[right].has_room(1)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("by_mpi", [False, True])
@pytest.mark.parametrize(("method", "length"), [("matches", 2), ("accept", 2), ("_finish", 3)])
def test_a_ctrl_c_keeps_messages_in_their_order(world, group, monkeypatch, by_mpi, method, length):
    """The message comes again, or goes on, or is lost with its receive. Those to oneself always go by MPI."""
    to, source = ((world.rank + by) % world.size for by in ((0, 0) if by_mpi else (1, -1)))
    other = [dist.irecv(np.zeros(1), source, group, tag=9)] if method != "_finish" else []
    works = [dist.irecv(np.zeros(3), source, group) for _ in range(2)]
    sent = [dist.isend(np.full(length, 1.0), to, group)]
    group.comm.Barrier()
    real = getattr(Message, method)

    def interrupt(*args):
        monkeypatch.undo()
        if method == "accept":
            real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Message, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        works[0].wait()
    sent += [dist.isend(np.full(size, 2.0), to, group, tag=tag) for size, tag in ((3, 0), (1, 9))[: 1 + len(other)]]
    if method == "_finish" and not by_mpi:
        with pytest.raises(dist.DistError, match="interrupted"):
            works[0].wait()
    else:
        works[0].wait()
        assert works[0].result()[0].tolist() == [1.0] * length + [0.0] * (3 - length)
    finish([works[1], *other, *sent])
    assert works[1].result()[0].tolist() == [2.0] * 3
