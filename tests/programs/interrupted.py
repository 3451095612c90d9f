"""A signal handler raises KeyboardInterrupt in a step, a generator, of another operation than the one that waits."""

import inspect
import os
import signal
import time

import numpy as np

import mpiddp as dist


def interrupt(number, frame):
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
        frame = frame.f_back


dist.init_process_group(timeout=20)
rank, first, second = dist.get_rank(), dist.new_group(), dist.new_group()
signal.signal(signal.SIGALRM, interrupt)
work = dist.all_reduce(np.ones(1 << 24), group=first, async_op=True)
if rank == 1:
    end = time.monotonic() + 4
    while time.monotonic() < end:
        work.is_completed()
        time.sleep(1e-3)
try:
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 2e-3, 2e-3)
    dist.all_reduce(np.ones(4), group=second)
    print(f"{rank} went on", flush=True)
except KeyboardInterrupt:
    print(f"{rank} interrupted", flush=True)
    time.sleep(5)
os._exit(0)
