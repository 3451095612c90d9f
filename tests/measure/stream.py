"""Samples a second from one C sender to one trainer: a stream against mpi4py's Recv into the same memory, in turns."""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from harness.launcher import Program, announced_size, mpiexec

from mpiddp.data import Stream, get_include

HERE = Path(__file__).parent
MEMORY_BYTES, MOST, SIZES = 1 << 26, 4096, [1 << n for n in (10, 14, 16, 18, 20, 22)]


def run(*command: object) -> str:
    with Program(map(str, command)) as program:
        done = program.wait(120)
    if done.rc != 0:
        raise SystemExit(str(done))
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.measure.stream", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each size (7)")
    options = parser.parse_args()
    launcher = mpiexec()
    if launcher is None:
        raise SystemExit("python -m tests.measure.stream needs an MPI with mpiexec and mpicc")
    print("| bytes of a sample | Recv's time / the stream's | lowest to highest | stream, MB/s |\n|---:|---:|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        sender = Path(folder, "sender")
        run(launcher.with_name("mpicc"), "-O2", f"-I{get_include()}", HERE / "stream_sender.c", "-o", sender)
        for size in SIZES:
            numbers = [size, min(MOST, MEMORY_BYTES // size), options.rounds]
            job = [sys.executable, "-m", "tests.measure.stream", *numbers]
            found = json.loads(run(launcher, "-n", 1, sender, *numbers, ":", "-n", 1, *job).splitlines()[-1])
            ratios, rate = sorted(found["ratios"]), statistics.median(found["rates"]) / 1e6
            middle, spread = statistics.median(ratios), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"| {size:,} | {middle:.2f} | {spread} | {rate:,.0f} |", flush=True)


def main_of_a_rank(size: int, count: int, rounds: int) -> None:
    """Receive by a stream and by mpi4py's Recv, in turns, into the same memory."""
    from mpi4py import MPI

    comm, ratios, rates = MPI.COMM_WORLD, [], []
    for _ in range(rounds):
        # Nothing is drawn before all have arrived.
        stream = Stream(comm, [0], f"x uint8 {size}", capacity=count, min_fill=count)
        memory = stream._slots.bytes
        memory[...] = 1
        comm.Send([None, MPI.BYTE], 0, 2)
        began = perf_counter()
        next(stream)
        ours_s = perf_counter() - began
        stream.close()
        comm.Send([None, MPI.BYTE], 0, 2)
        began = perf_counter()
        for i in range(count):
            comm.Recv([memory[i], MPI.BYTE], 0, 1)
        recv_s = perf_counter() - began
        ratios.append(recv_s / ours_s)
        rates.append(size * count / ours_s)
    print(json.dumps({"ratios": ratios, "rates": rates}))


if __name__ == "__main__":
    if announced_size():
        main_of_a_rank(*map(int, sys.argv[1:]))
    else:
        main()
