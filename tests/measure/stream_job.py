"""Rank 1 of `tests.measure.stream`: receive by a stream and by mpi4py's Recv, in turns, into the same memory."""

from __future__ import annotations

import json
import sys
from time import perf_counter

from mpi4py import MPI

from mpiddp.data import Stream


def main() -> None:
    size, count, rounds, window = map(int, sys.argv[1:])
    comm, ratios, rates = MPI.COMM_WORLD, [], []
    for _ in range(rounds):
        # Nothing is drawn before all have arrived.
        stream = Stream(comm, [0], f"x uint8 {size}", capacity=count, min_fill=count, window=window)
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


main()
