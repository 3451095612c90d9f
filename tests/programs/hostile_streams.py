"""Streams of random sources that make mistakes, beside a stranger, and closes in between: ``FIRST_SEED COUNT``.

No good sample is lost or comes twice, each mistake is told once, and no slot is in two places.
"""

import random
import re
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiddp.data
from mpiddp.data import Stream
from mpiddp.errors import MismatchError

world = MPI.COMM_WORLD
_PAGE = Path(mpiddp.data.__file__).with_name("README.md").read_text()
_scope: dict = {}
exec(re.search(r"```python\n(.*?)```", _PAGE, re.DOTALL)[1], _scope)
# Open MPI ends a stream with a sample that is too long, whose memory may be anybody's.
LONGER = () if "Open MPI" in MPI.Get_library_version() else (1, 9, 200_000)


def drawn(comm, sources, fields, plans, size, draw):
    """Draw all, and compare with what the sources were told to send."""
    stream = Stream(
        comm,
        sources,
        fields if draw.random() < 0.5 else None,
        policy="fifo",
        batch_size=draw.choice([1, 3]),
        capacity=draw.choice([4, 50]),
        window=draw.choice([1, 2, 5, 64]),
        num_replicas=1,
        rank=0,
        timeout=20,
    )
    left, found, told = draw.choice([None, None, 0, 3]), [], 0
    closes = left is not None
    while left != 0:
        left = None if left is None else left - 1
        try:
            batch = next(stream)
        except StopIteration:
            break
        except MismatchError as error:
            assert re.search(r"(too long a sample|a sample of \d+ bytes) from rank \d", str(error)), error
            told += 1
            continue
        assert (batch.x == batch.n[:, None] % 1000).all(), batch
        found += batch.n.tolist()
        slots = stream._slots
        everywhere = sorted([*slots.free, *slots._posted, *stream._policy.slots])
        assert everywhere == list(range(len(slots.bytes))), everywhere
    stream.close()
    good = [1000 * rank + i for rank, plan in plans.items() for i, each in enumerate(plan) if each == size]
    assert len({*found}) == len(found) and {*found} <= {*good}, found
    wrong = sum(each != size for plan in plans.values() for each in plan)
    assert closes or (sorted(found) == sorted(good) and told >= wrong), (found, good, told, wrong)


def trial(seed):
    draw, comm = random.Random(seed), world.Dup()
    length = draw.choice([1, 50, 3000])
    size, fields = 8 + 4 * length, f"n int64; x float32 {length}"
    sources = draw.sample(range(1, world.size), draw.randint(1, world.size - 1))
    mistakes, odds = [0, 1, size - 1, *(size + each for each in LONGER)], draw.choice([0, 0.05, 0.3])
    count = draw.choice([5, 100])
    plans = {rank: [draw.choice(mistakes) if draw.random() < odds else size for _ in range(count)] for rank in sources}
    strangers = [draw.choice([size, *mistakes]) for _ in range(draw.choice([0, 1, 4]))]
    sent = []
    if comm.rank == 0:
        drawn(comm, sources, fields, plans, size, draw)
    elif comm.rank in plans:
        source = _scope["Source"](comm, fields)
        for i, each in enumerate(plans[comm.rank]):
            number = 1000 * comm.rank + i
            sample = np.concatenate([np.int64([number]).view("u1"), np.full(length, i, "f4").view("u1")])
            if source.put(sample if each == size else np.zeros(each, "u1")) < 0:
                break
        source.close()
    elif comm.rank == min({*range(1, comm.size)} - plans.keys()):
        sent = [comm.Isend([np.zeros(each, "u1"), MPI.BYTE], 0, 31002) for each in strangers]
    comm.Barrier()
    status = MPI.Status()
    while comm.rank == 0 and comm.Iprobe(tag=31002, status=status):
        comm.Recv(np.empty(status.count, "u1"), status.source, 31002)
    MPI.Request.Waitall(sent)
    comm.Barrier()
    comm.Free()


first, count = map(int, sys.argv[1:])
for seed in range(first, first + count):
    try:
        trial(seed)
    except BaseException:
        print("seed", seed, file=sys.stderr, flush=True)
        raise
if world.rank == 0:
    print(count, "right", flush=True)
