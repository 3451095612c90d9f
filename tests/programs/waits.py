"""Rank 1 does one thing, and the others another: ``waits.py ONE OTHERS [FILE]``; "alike" lets rank 1 do as they do.

Each rank prints its process id first. With FILE there is a call before, ``save`` ends when the file is there, and rank
1 then does as the others do.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import mpiddp as dist

dist.init_process_group()
rank, x, long = dist.get_rank(), np.ones(4), np.ones(200_000)
one, others, file = [*sys.argv[1:], ""][:3]
if file:
    dist.all_reduce(x)


def save():
    end = time.monotonic() + 60
    while time.monotonic() < end and not Path(file).exists():
        time.sleep(1e-3)


sys.stdout.write(f"pid of {rank}: {os.getpid()}.\n")
sys.stdout.flush()
if rank == 1:
    time.sleep(0.2)
    match one:
        case "raise":
            raise ValueError("boom")
        case "exit 3":
            sys.exit(3)
        case "exit beside a timer":
            threading.Timer(1, print).start()
            sys.exit()
        case "_exit 0":
            os._exit(0)
        case "SIGKILL" | "SIGSTOP":
            os.kill(os.getpid(), getattr(signal, one))
        case "crash":
            ctypes.string_at(8)
        case "sleep":
            time.sleep(60)  # in rank 1
        case "save":
            save()
        case "hold the interpreter":
            sys.setswitchinterval(60)
            while True:
                pass
        case "sleep after new_group":
            dist.new_group(timeout=1.5)
            time.sleep(60)
        case "recv from 0" | "recv from 2":
            dist.recv(x, src=int(one[-1]))
        case "irecv from 0":
            dist.irecv(x, src=0).wait()
if rank != 1 or one == "alike" or file:
    match others:
        case "all_reduce":
            dist.all_reduce(x)
        case "long all_reduce":
            dist.all_reduce(long)
        case "new_group":
            dist.new_group([0, 2])
        case "all_reduce in new_group":
            dist.all_reduce(x, group=dist.new_group(timeout=1.5))
        case "send of 0" | "send of 0 with tag 1" | "long send of 0" if rank == 0:
            dist.send(long if "long" in others else x, dst=1, tag=int("tag" in others))
        # Ranks 0 and 1 do one thing, and rank 2 another.
        case "recv on 2":
            dist.recv(x, src=0) if rank == 2 else dist.all_reduce(x)
        case "compute":
            while True:
                x = x + 1
        case "exit":
            sys.exit()
        case "loop":
            while True:
                dist.all_reduce(x)
        case "handler":
            caught = []
            signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
            sys.stdout.write("handler set.\n")
            sys.stdout.flush()
            end = time.monotonic() + 20
            while rank == 2 and not caught and time.monotonic() < end:
                time.sleep(0.05)
            dist.barrier()
            if rank == 2:
                print("caught", caught, flush=True)
print("went on", flush=True)
