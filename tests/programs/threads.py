"""Two threads of each of two ranks communicate at once: ``threads.py CASE [ASYNC] [COUNT]``."""

import os
import sys
import threading
import time

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.autograd import Tensor

case, later, count = sys.argv[1], *map(int, [*sys.argv[2:], "0", "8"][:2])
dist.init_process_group(timeout=10)
rank, size = dist.get_rank(), dist.get_world_size()
wrong = []


def all_reduce(x, group):
    work = dist.all_reduce(x, group=group, async_op=bool(later))
    if later:
        work.wait()


def guarded(call, *args):
    try:
        call(*args)
    except BaseException as error:
        wrong.append(repr(error))


def thread(call, *args):
    made = threading.Thread(target=guarded, args=(call, *args), daemon=True)
    made.start()
    return made


def join(*threads):
    for each in threads:
        each.join(15)
    if wrong or any(each.is_alive() for each in threads):
        print("wrong", wrong, file=sys.stderr, flush=True)
        os._exit(1)  # the end of the program would wait for operations of failed threads


def reduce(group):
    for number in range(60):
        x = np.full(count, float(rank + number))
        all_reduce(x, group)
        assert (x == sum(range(size)) + size * number).all(), number


def gather_metrics(group):
    for _ in range(20):
        y = np.full(1 << 18, float(rank))
        dist.all_reduce(y, group=group, async_op=True).wait()
        assert (y == sum(range(size))).all()


def train():
    dist.manual_seed(1)
    layers = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)
    model = dist.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    metrics = thread(gather_metrics, dist.new_group())
    x = Tensor(np.random.default_rng(rank).standard_normal((64, 512), dtype=np.float32))
    for _ in range(20):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    join(metrics)


def beside_a_short_call():
    """Rank 0 waits in a short call for rank 1, and rank 1 for operations of another thread of rank 0."""
    group, x, y, main_is_back = dist.new_group(), np.ones(2), np.ones(100), threading.Event()

    def submit():
        works = [dist.all_reduce(y, group=group, async_op=True) for _ in range(2)]
        return works[1].wait

    def submit_and_compute():
        time.sleep(0.5)
        wait = submit()
        main_is_back.wait()
        wait()

    if rank == 0:
        other = thread(submit_and_compute)
        dist.all_reduce(x)
        main_is_back.set()
        join(other)
    else:
        time.sleep(1)
        submit()()
        dist.all_reduce(x)
    assert (x == size).all() and (y == size**2).all()


def in_one_group():
    """Rank 0's first call waits for rank 1, whose main thread waits for the second one."""
    x = np.ones(count)
    if rank == 0:
        other = thread(dist.all_reduce, x)
        time.sleep(1)
        try:
            dist.barrier()
        except dist.DistError as error:
            print("refused:", error, flush=True)
        dist.send(np.ones(1), 1)
        join(other)
    else:
        dist.recv(np.ones(1), 0)
        dist.all_reduce(x)
    assert (x == size).all()


def overlapping():
    """Two calls end in another order than they began; then the process computes beyond the timeout."""
    groups = [dist.new_group(timeout=2), dist.new_group(timeout=2)]
    if rank == 0:
        threads = []
        for group in groups:
            threads.append(thread(all_reduce, np.ones(2), group))
            time.sleep(0.3)
        join(*threads)
    else:
        for group in groups:
            time.sleep(0.8)
            dist.all_reduce(np.ones(2), group=group)
    time.sleep(4)


match case:
    case "a group each":
        join(*[thread(reduce, group) for group in (dist.new_group(), dist.new_group())])
    case "beside DDP":
        guarded(train)
        join()
    case "beside a short call":
        beside_a_short_call()
    case "one group":
        in_one_group()
    case "overlapping":
        overlapping()
    case "after the main thread":
        threading.Timer(6 * rank, lambda: print("right", dist.barrier(), flush=True)).start()
        sys.exit()
dist.barrier()
print("right", flush=True)
