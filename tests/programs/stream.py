"""Sources in plain mpi4py, as the README of mpiddp.data has them, and the ranks that train: on three ranks.

Each scenario is a function of the world that raises on the rank that finds something wrong.
"""

import atexit
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiddp
import mpiddp.data
from mpiddp.data import Stream
from mpiddp.errors import DistError, DistTimeoutError, MismatchError

_SCOPE: dict[str, type] = {}
_PAGE = Path(mpiddp.data.__file__).with_name("README.md").read_text()
exec(re.search(r"```python\n(.*?)```", _PAGE, re.DOTALL)[1], _SCOPE)
Source = _SCOPE["Source"]
FIELDS = "x float32 3; y float64 2 2; n int64"
SAMPLE = np.zeros(3, np.float32), np.zeros((2, 2)), np.int64(0)
TAG = 31000
world = MPI.COMM_WORLD
ME = world.rank


def send(count, comm=world, first=0, pause_s=0.0, fields=FIELDS, **how):
    source = Source(comm, fields, **how)
    results = []
    for n in range(first, first + count):
        results.append(source.put(np.full(3, n, np.float32), np.full((2, 2), n / 2), np.int64(n)))
        if results[-1] < 0:
            break
        time.sleep(pause_s)
    source.close()
    return results, source


def send_one(until):
    """Send a sample, and end when that rank says so."""
    source = Source(world, FIELDS)
    assert source.put(*SAMPLE) == 1
    world.recv(source=until, tag=5)
    source.close()


@contextlib.contextmanager
def raises(kind, *texts):
    try:
        yield
    except kind as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(texts)


def check(batch):
    x, y, n = batch
    assert x.shape == (len(n), 3) and x.dtype == np.float32 and y.shape == (len(n), 2, 2) and y.dtype == np.float64
    assert (x == n[:, None]).all() and (y == n[:, None, None] / 2).all() and batch.n is n
    return n.tolist()


def all_of(stream):
    return [n for batch in stream for n in check(batch)]


def expect_each_once(found, count):
    parts = world.gather(found)
    if ME == 0:
        assert sorted(n for part in parts for n in part) == list(range(count)), parts


def two_sources_uneven():
    """One trainer, sources that end at different times, every sample drawn, none unknown, fields given."""
    if ME < 2:
        send(7 if ME else 300, first=1000 * ME)
        return
    dtype = np.dtype([("x", "f4", 3), ("y", "f8", (2, 2)), ("n", "i8")])
    stream = Stream(world, [0, 1], dtype, batch_size=5, capacity=40, min_fill=30, window=2)
    first = check(next(stream))
    assert stream.metrics["held"] + stream.metrics["left"] >= 30 and stream.metrics["held"] <= 44
    found = {*first, *all_of(stream)}
    assert found == {*range(300), *range(1000, 1007)}
    metrics = stream.metrics
    assert metrics["received"] == 307 and metrics["drawn"] >= 307 and metrics["dropped"] == metrics["held"] == 0
    assert list(stream) == []


def stranger():
    """A rank that is none of the sources describes itself and ends, which disturbs nobody."""
    if ME == 2:
        world.Send([FIELDS.encode(), MPI.CHAR], 0, TAG + 1)
        world.Send(np.zeros(3, np.int64), 0, TAG + 3)
    world.Barrier()
    if ME == 0:
        assert all_of(Stream(world, sources=[1], num_replicas=1, batch_size=4, policy="fifo")) == [*range(20)]
    elif ME == 1:
        send(20)


def strange_sample():
    """A sample of a rank that is none of the sources is refused, and takes no source's place."""
    if ME > 0:
        world.recv(source=0, tag=5)
    if ME == 2:
        world.Send([np.zeros(52, np.uint8), MPI.BYTE], 0, TAG + 2)
    elif ME == 1:
        send(20)
    else:
        stream = Stream(world, [1], FIELDS, window=1, num_replicas=1, policy="fifo", timeout=20)
        world.send(None, 2, tag=5)
        with raises(MismatchError, "from rank 2"):
            next(stream)
        world.send(None, 1, tag=5)
        assert all_of(stream) == [*range(20)]


def slow_trainer():
    """It slows its source, or drops; never more than the window and the capacity are sent ahead."""
    for full in ("wait", "drop"):
        if ME == 0:
            results, source = send(60, pause_s=0.002 if full == "drop" else 0)
            dropped = results.count(0)
            assert (dropped > 0) == (full == "drop") and (source.slowed > 0) == (full == "wait"), (full, source.slowed)
            world.send((dropped, source.slowed), 1, tag=5)
        elif ME == 1:
            stream = Stream(world, [0], batch_size=2, capacity=4, policy="fifo", window=3, full=full)
            found = []
            for batch in stream:
                found += check(batch)
                time.sleep(0.02)
                assert batch.n[-1] < len(found) + 60 * (full == "drop") and stream.metrics["held"] <= 4 + 3
            dropped, slowed = world.recv(source=0, tag=5)
            assert len(found) == 60 - dropped
            assert (stream.metrics["dropped"], stream.metrics["slowed"]) == (dropped, slowed)


def trainer_stops():
    """The source is told, by close and by the end of the block; another stream follows at once on the same tags."""
    for _ in range(2):
        if ME == 0:
            results, _ = send(100_000)
            assert results[-1] == -1 and len(results) > 20
        elif ME == 1:
            with Stream(world, [0], batch_size=10, capacity=20, min_fill=20) as stream:
                for _ in range(3):
                    check(next(stream))
    if ME == 0:
        assert send(5)[0] == [1] * 5
    elif ME == 1:
        assert all_of(Stream(world, [0], policy="fifo")) == list(range(5))


def next_stream():
    """A trainer ends, and begins its next stream, while another one still reads this one, from the same source."""
    found = []
    if ME == 0:
        source = Source(world, FIELDS)
        while not world.Iprobe(1, 5):
            source.put(*SAMPLE)
        world.recv(source=1, tag=5)
        source.close()
        assert send(7)[0] == [1] * 7
    else:
        with Stream(world, [0], policy="fifo", window=2, num_replicas=2, rank=ME - 1) as stream:
            check(next(stream))
            for batch in stream if ME == 2 else ():
                check(batch)
        stream = Stream(world, [0], policy="fifo", window=2, num_replicas=2, rank=ME - 1)
        if ME == 1:
            world.send(None, 0, tag=5)
        found = all_of(stream)
    expect_each_once(found, 7)


def mistakes():
    """Other fields, a short sample, and a long one: errors that name the source and the sizes.

    Often, because the three messages of a source arrive in any order.
    """
    for wrong in ("fields", "short", "long") * 30:
        if ME == 0:
            source = Source(world, FIELDS if wrong != "fields" else "x float32 3")
            x, y, n = SAMPLE
            source.put(*{"fields": (x,), "short": (x, n), "long": (x, y, n, n)}[wrong])
            source.close()
        elif ME == 1:
            stream = Stream(world, [0], FIELDS)
            texts = {"fields": ["source 0", "'x float32 3'", FIELDS], "short": ["20 bytes", "rank 0", "52 bytes"]}
            with raises(MismatchError, *texts.get(wrong, ["too long a sample", "rank 0", "52 bytes"])):
                next(stream)
            if wrong == "long" and "Open MPI" in MPI.Get_library_version():
                for call in (stream.__next__, stream.state_dict):  # its samples may have been written over
                    with raises(MismatchError, "begin again"):
                        call()
            stream.close()


def silent_source():
    """A warning while the reservoir goes on, an error while the rank waits; both name the source that is silent."""
    if ME == 0:
        send(50, pause_s=0.03)
    elif ME == 1:
        send_one(until=2)
    else:
        stream, found = Stream(world, [0, 1], batch_size=3, capacity=60), 0
        while {*stream._live} != {1}:
            found += len(check(next(stream)))
            time.sleep(0.01)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            next(stream)
            time.sleep(0.01)
        world.send(None, 1, tag=5)
        all_of(stream)


def nothing_comes():
    if ME == 0:
        world.recv(source=1, tag=5)
        send(3)
    elif ME == 1:
        stream = Stream(world, [0], timeout=1.0)
        with raises(DistTimeoutError, "no sample in 1 s", "source 0, which has not opened its stream"):
            next(stream)
        world.send(None, 0, tag=5)
        assert len(set(all_of(stream))) == 3


def killed_source():
    """If ranks survive, the trainer of a source that dies gets an error that names the source."""
    if ME == 1:
        source = Source(world, FIELDS)
        source.put(*SAMPLE)
        world.recv(source=2, tag=5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif ME == 2:
        stream = Stream(world, [1], policy="fifo", timeout=20)
        check(next(stream))
        world.send(None, 1, tag=5)
        try:
            next(stream)
            raise AssertionError
        except DistError as error:
            print("told:", error, flush=True)
            assert "source 1, silent for" in str(error) and not isinstance(error, DistTimeoutError), error
        atexit.unregister(stream.close)
    print("survived:", ME, flush=True)
    time.sleep(0.5)
    os._exit(0)  # MPI_Finalize would wait for the dead


def intercommunicator():
    """The sources are ranks of the remote group; samples come in order, the last batch is partial, each gets some."""
    local = MPI.Intracomm(world.Split(int(ME > 0), ME))
    across = local.Create_intercomm(0, world, 1 if ME == 0 else 0)
    found = []
    if ME == 0:
        assert send(101, across)[0] == [1] * 101
    else:
        found = all_of(Stream(across, [0], batch_size=4, policy="fifo", window=3, num_replicas=2, rank=ME - 1))
        assert found == sorted(found) and len(found) >= 3
    across.Free()
    local.Free()
    expect_each_once(found, 101)


def state():
    """A stream goes on from another's checkpoint with the same draws, and with the same samples, more than fit."""
    if ME == 0:
        send(30)
        send(0)
    elif ME == 1:
        stream = Stream(world, [0], batch_size=4, capacity=22, min_fill=22)
        next(stream)
        while stream._live:
            stream._progress()
        with tempfile.TemporaryDirectory() as folder:
            mpiddp.save(stream.state_dict(), f"{folder}/checkpoint")
            saved = mpiddp.load(f"{folder}/checkpoint")
        assert len(saved["samples"]) > 22
        expected = all_of(stream)
        other = Stream(world, [0], batch_size=4, capacity=22, min_fill=22, seed=9)
        other.load_state_dict(saved)
        while other._live:
            other._progress()
        assert all_of(other) == expected and len(expected) == len(saved["samples"]) >= 26
        assert other.metrics["received"] == 30 and other.metrics["drawn"] == 4 + len(expected)
        with raises(ValueError, "needs a new stream"):
            other.load_state_dict(saved)


def refusals():
    """Arguments that cannot work are errors that say what to do, and leave no stream open."""
    gaps = np.dtype([("x", "f4"), ("n", "i8")], align=True)
    for words, text in (
        ({"fields": "x float32 0"}, "at least one byte"),
        ({"fields": np.dtype([("x", ">f4")])}, "byte order"),
        ({"fields": gaps}, "without gaps"),
        ({"fields": np.dtype([("x", "O")])}, "a dtype of NumPy"),
        ({"fields": np.dtype([("x", [("y", "f4")])])}, "a dtype of NumPy"),
        ({"fields": "x bfloat16 3"}, "as integers of their size"),
        ({"sources": [world.size]}, "different ranks of the communicator"),
        ({"sources": [0, 0]}, "different ranks of the communicator"),
        ({"rank": 1}, "below num_replicas"),
    ):
        with raises(ValueError, text):
            Stream(world, **{"sources": [0], "num_replicas": 1, **words})


def two_at_once():
    """Two streams at once, of other tags and fields, among them half numbers and a field without elements."""
    fields = "h float16 2; b bool; c complex64; none float32 0; s float64"
    if ME == 0:
        assert send(20)[0] == [1] * 20
    elif ME == 1:
        source = Source(world, fields, tag=500)
        for n in range(25):
            sample = np.float16([n, n / 2]), np.bool_(n % 2), np.complex64(n * 1j), np.zeros(0, "f4"), np.float64(n)
            assert source.put(*sample) == 1
        source.close()
    elif ME == 2:
        one = Stream(world, [0], batch_size=2, policy="fifo")
        other = Stream(world, [1], batch_size=5, policy="fifo", tag=500)
        with raises(ValueError, "close it first, or give this one and its sources another tag"):
            Stream(world, [1], tag=503)
        found = []
        for h, b, c, none, s in other:
            assert h.dtype == np.float16 and (h == np.stack([s, s / 2], 1)).all() and none.shape == (5, 0)
            assert (b == s % 2).all() and (c == s * 1j).all()
            found += check(next(one, ())) if len(found) < 20 else []
        assert found + all_of(one) == list(range(20))


def no_end():
    """A source whose program goes on without an end is named; one with letters that are no fields, too."""
    if ME == 0:
        send_one(until=2)
    elif ME == 1:
        Source(world, "x float33 é").close()
    elif ME == 2:
        stream = Stream(world, [0], timeout=1, policy="fifo")
        next(stream)
        for call in (stream.__next__, stream.close):
            with raises(DistTimeoutError, "source 0, silent for", "after 1 samples"):
                call()
        world.send(None, 0, tag=5)
        stream.close()
        with Stream(world, [1]) as stream, raises(MismatchError, "source 1 has 'x float33 é': a field is a name"):
            next(stream)


def group_beside():
    """Trainers of a guest's group, one of which runs out of samples before the other; models stay alike."""
    part = world.Split(0 if ME in (1, 2) else MPI.UNDEFINED)
    if ME not in (1, 2):
        send(60 if ME else 11)
        return
    mpiddp.init_process_group(comm=part)
    stream = Stream(world, [0, 3], batch_size=4, policy="fifo", window=2)
    model = mpiddp.DistributedDataParallel(mpiddp.nn.Linear(3, 1))
    optimizer, batches = mpiddp.optim.SGD(model.parameters(), lr=1e-4), 0
    while True:
        batch = next(stream, None)
        mine = 0 if batch is None else len(batch.n)
        mpiddp.all_reduce(total := np.array([mine]))
        if total == 0:
            break
        optimizer.zero_grad()
        with model.weighted(mine, float(total[0])):
            if batch is not None:
                model(batch.x).mean().backward()
        optimizer.step()
        batches += mine > 0
    alike = part.allgather((batches, model.module.weight.data.tobytes()))
    assert [each[0] for each in alike] == [3, 15] and alike[0][1] == alike[1][1], alike
    mpiddp.destroy_process_group()


def group_ends_first():
    """The group is destroyed, and another one is made, while the stream is open."""
    part = world.Split(0 if ME in (1, 2) else MPI.UNDEFINED)
    if ME not in (1, 2):
        send(50)
        return
    mpiddp.init_process_group(comm=part)
    stream = Stream(world, [0, 3], batch_size=2, policy="fifo", timeout=30)
    found = check(next(stream))
    pair = mpiddp.new_group([1, 0])
    mpiddp.all_reduce(x := np.ones(3), group=pair)
    mpiddp.destroy_process_group()
    found += check(next(stream))
    mpiddp.init_process_group(comm=part)
    found += all_of(stream)
    mpiddp.all_reduce(x)
    mpiddp.all_reduce(counted := np.array([len(found)]))
    assert (x == 4).all() and counted == 100
    mpiddp.destroy_process_group()


for name in sys.argv[1:]:
    globals()[name]()
    world.Barrier()
    if ME == 0:
        print("done:", name, flush=True)
