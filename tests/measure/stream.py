"""Samples a second from one C sender to one trainer: a stream against mpi4py's Recv into the same memory, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from harness.launcher import Program, mpiexec

from mpiddp.data import get_include

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
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=7, help="of each size (7)")
    parser.add_argument("--window", type=int, default=128, help="unconfirmed samples (128)")
    options = parser.parse_args()
    launcher = mpiexec()
    if launcher is None:
        raise SystemExit("python -m tests.measure.stream needs an MPI with mpiexec and mpicc")
    print("| bytes of a sample | Recv's time / the stream's | lowest to highest | stream, MB/s |\n|---:|---:|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        sender = Path(folder, "sender")
        run(launcher.with_name("mpicc"), "-O2", f"-I{get_include()}", HERE / "stream_sender.c", "-o", sender)
        for size in options.sizes:
            numbers = [size, min(MOST, MEMORY_BYTES // size), options.rounds]
            job = [sys.executable, HERE / "stream_job.py", *numbers, options.window]
            found = json.loads(run(launcher, "-n", 1, sender, *numbers, ":", "-n", 1, *job).splitlines()[-1])
            ratios, rate = sorted(found["ratios"]), statistics.median(found["rates"]) / 1e6
            middle, spread = statistics.median(ratios), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"| {size:,} | {middle:.2f} | {spread} | {rate:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
