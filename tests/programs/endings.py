"""Three ranks that end their programs in many ways: ``endings.py CASE``."""

import atexit
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np

import mpiddp as dist

case = sys.argv[1]
if case == "stopped before MPI_Finalize":
    from mpiddp.mpi.lazy import MPI

    # Registered first, it runs when all ranks have met at their ends, and before MPI_Finalize.
    if MPI.COMM_WORLD.rank == 1:
        atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
dist.init_process_group()
rank, x = dist.get_rank(), np.ones(4)


def last_words():
    if rank == 1:
        if case == "slow last words":
            time.sleep(5)
        else:
            raise ValueError("boom")
    if case != "an exception at exit":
        dist.all_reduce(x)
        assert x[0] == 3


def refused(call):
    try:
        call()
    except dist.DistError as error:
        return str(error)
    raise AssertionError("a call went on")


def in_a_child(call):
    """Call in a child of a fork of rank 1, in which MPI must not be used."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
    child = os.fork() if rank == 1 else -1
    if child == 0:
        try:
            call()
        except Exception as error:
            assert "fork" in str(error), error
            print("refused", flush=True)
        sys.exit(5)
    if child > 0:
        end, found = time.monotonic() + 20, (0, 0)
        while not found[0] and time.monotonic() < end:
            time.sleep(0.05)
            found = os.waitpid(child, os.WNOHANG)
        assert found[0] and os.waitstatus_to_exitcode(found[1]) == 5, found
    y = np.ones(4)
    for _ in range(3):
        dist.all_reduce(y)
    assert y[0] == 27


match case:
    # A rank is done early.
    case "after the last collective":
        dist.new_group([0, 2])
        dist.all_reduce(x)
        if rank == 0:
            time.sleep(6)
    case "among those that never waited for their operations":
        if rank == 0:
            work = dist.isend(np.full(1_000_000, 2.0), dst=1)
        if rank == 1:
            time.sleep(5)
            big = np.zeros(1_000_000)
            dist.recv(big, src=0)
            assert (big == 2).all()
        works = [dist.all_reduce(np.ones(30_000), async_op=True) for _ in range(3)]
    case "slow last words" | "an exception at exit" | "a failure in the last words":
        atexit.register(last_words)
        if case == "an exception at exit" and rank == 0:
            work = dist.isend(np.ones(3), dst=1)  # which nobody receives
    # All of them end alike.
    case "Finalize called by the program, at different times":
        from mpi4py import MPI

        time.sleep(rank)
        MPI.Finalize()
        for late in (lambda: dist.all_reduce(x), dist.barrier, lambda: dist.new_group([0])):
            assert "MPI has been finalised" in refused(late)
        dist.destroy_process_group()
    case "alone":
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
    case "exit code":
        dist.barrier()
        sys.exit(75)
    case "all_reduce":
        dist.all_reduce(x)
    case "without MPI_THREAD_MULTIPLE":
        thread = threading.Thread(target=lambda: print("refused:", refused(lambda: dist.all_reduce(x)), flush=True))
        thread.start()
        thread.join()
        if rank == 0:
            time.sleep(4)
        dist.all_reduce(x)
        assert x[0] == 3
    case "late":
        group = dist.new_group(timeout=2)
        if rank == 1:
            time.sleep(8)
        dist.all_reduce(x, group=group)
        print("went on", flush=True)
    case "forked":
        in_a_child(lambda: dist.all_reduce(x))
        in_a_child(dist.init_process_group)
    # They do not end well.
    case "raise on all":
        raise ValueError("boom")
    case "a reason that cannot be told":
        from mpiddp.faults.abort import abort

        if rank == 1:
            abort(lambda: 1 / 0, 7)
        dist.barrier()
    case "stopped":
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
