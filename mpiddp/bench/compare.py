r"""``bench compare``: mpiddp beside plain mpi4py, one copy of the bytes, and torch on Gloo and on mpiddp, in one run.

All take turns in the same processes, on arrays written anew before each call. A ratio is the median of the rounds'
ratios.

mpi4py's column is MPI's default algorithm. MPICH refuses its shared-memory all-reduce (release_gather) under
THREAD_MULTIPLE, which mpi4py and mpiddp ask for; a job without mpiddp's watchdog shows it::

    MPI4PY_RC_THREAD_LEVEL=serialized MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=release_gather \
        mpirun -np 2 python -m mpiddp bench compare all_reduce
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any, NamedTuple

import numpy as np

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.reduction import mpi_op

from .job import Bench, dtype, job, symmetric
from .operations import REDUCING, Buffers, Contender, Mpiddp, check_reduction, new_series, reduce_op
from .results import Point, Series, format_size
from .timing import Call, Way

_ROUND_S = 0.02
_FEWEST = 3
SYMMETRIC = "symmetric"
RATIOS = (
    ("mpi4py", "mpiddp"),
    ("mpi4py", SYMMETRIC),
    (SYMMETRIC, "memcpy"),
    ("gloo", "mpiddp"),
    ("gloo", SYMMETRIC),
    ("gloo", "torch"),
)
"""Divided: above 1, the second is faster."""


class Mpi4py(Contender):
    """On a communicator of its own."""

    name = "mpi4py"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def prepare(self, b: Buffers) -> Call | None:
        comm, x, output, root = self._comm, b.x, b.output, b.root
        op = mpi_op(b.dtype, reduce_op(b.op))
        if op is None or b.dtype.kind not in "biufc":
            return None
        share = b.dtype.type(1 / b.size) if b.op == "avg" else None

        def reduce_with(call: Call) -> Call:
            return call if share is None else lambda: (call(), np.multiply(output, share, out=output))

        here = b.rank == root
        calls: dict[str, Call] = {
            "all_reduce": reduce_with(lambda: comm.Allreduce(MPI.IN_PLACE, x, op)),
            "broadcast": lambda: comm.Bcast(x, root),
            "reduce": lambda: comm.Reduce(MPI.IN_PLACE if here else x, x if here else None, op, root),
            "all_gather": lambda: comm.Allgather(x, output),
            "reduce_scatter": reduce_with(lambda: comm.Reduce_scatter_block(x, output, op)),
            "gather": lambda: comm.Gather(x, output if here else None, root),
            "scatter": lambda: comm.Scatter(x if here else None, output, root),
            "all_to_all": lambda: comm.Alltoall(x, output),
            "send_recv": lambda: comm.Sendrecv(x, (b.rank + 1) % b.size, recvbuf=output, source=(b.rank - 1) % b.size),
            "barrier": comm.Barrier,
        }
        if b.operation == "reduce" and here:
            return reduce_with(calls["reduce"])
        return calls[b.operation]


class Memcpy(Contender):
    """One copy of S bytes by all ranks at once: the bound of memory.

    The barrier at its end counts: ranks that share a core copy one after the other.
    """

    name = "memcpy"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def prepare(self, b: Buffers) -> Call | None:
        if not b.total_bytes:
            return None
        source = max(b.x, b.output, key=lambda array: array.nbytes)
        target = np.ones_like(source)

        def copy() -> None:
            np.copyto(target, source)
            self._comm.Barrier()

        return copy


class Measured(NamedTuple):
    point: Point
    rounds: list[float]


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a result was wrong."""
    kind, operation = dtype(arguments.dtype), arguments.operation
    check_reduction(operation, arguments.op, kind)
    with job() as here:
        here.describe()
        found: list[Contender] = [Mpiddp(), Mpiddp(SYMMETRIC), Mpi4py(here.comm), Memcpy(here.comm)]
        torch = here.torch() if arguments.torch else None
        if torch is not None:
            found += torch.contenders
        series = _compare(here, found, arguments, kind)
        wrong = {each.name: sum(point.wrong or 0 for point in each.points) for each in series}
        found_wrong = ", ".join(f"{name} {count} FAILED" for name, count in wrong.items() if count)
        here.say(f"# Wrong values: {found_wrong or '0 OK'}")
        if torch is not None:
            torch.close()
        here.write(arguments.json, "compare", series)
    return int(any(wrong.values()))


def _compare(here: Bench, found: list[Contender], arguments: argparse.Namespace, kind: np.dtype[Any]) -> list[Series]:
    operation = arguments.operation
    swept = [0] if operation == "barrier" else arguments.sizes
    shared = symmetric(max(swept) + here.size * kind.itemsize)
    names = [each.name for each in found]
    titles = [f"mpiddp {SYMMETRIC}" * (name == SYMMETRIC) or name for name in names]
    series = {name: new_series(title, here.size, arguments) for name, title in zip(names, titles, strict=True)}
    ratios = [pair for pair in RATIOS if set(pair) <= set(names)]
    redop = f" {arguments.op}" * (operation in REDUCING)
    here.say(f"# {operation}{redop} of {arguments.dtype}, written anew before each call; median time of the slowest")
    here.say("# rank in us, then ratios of times")
    here.say(_line("size", names, [f"{slow}/{fast}" for slow, fast in ratios], "algorithm"))
    last = -1
    for size in swept:
        plain = Buffers(operation, here.rank, here.size, size, kind, arguments.op)
        if plain.total_bytes == last:
            continue
        last = plain.total_bytes
        there = Buffers(operation, here.rank, here.size, size, kind, arguments.op, shared)
        measured = _measure(here, [(each, there if each.name == SYMMETRIC else plain) for each in found], arguments)
        for name, each in measured.items():
            series[name].points.append(each.point)
        times = [f"{measured[name].point.median_s * 1e6:.1f}" if name in measured else "-" for name in names]
        quotients = [_ratio(measured, *pair) for pair in ratios]
        here.say(_line(format_size(last), times, quotients, measured["mpiddp"].point.algorithm))
    return [each for each in series.values() if each.points]


def _line(size: str, times: list[str], ratios: list[str], algorithm: str) -> str:
    cells = [size.rjust(8), *(time.rjust(12) for time in times), *(ratio.rjust(18) for ratio in ratios)]
    return f"{''.join(cells)}  {algorithm}"


def _ratio(measured: dict[str, Measured], slow: str, fast: str) -> str:
    if slow not in measured or fast not in measured:
        return "-"
    pairs = zip(measured[slow].rounds, measured[fast].rounds, strict=True)
    return f"{statistics.median(one / other for one, other in pairs):.2f}"


def _measure(
    here: Bench, entered: list[tuple[Contender, Buffers]], arguments: argparse.Namespace
) -> dict[str, Measured]:
    ways: dict[str, Way] = {}
    for contender, buffers in entered:
        buffers.reset()
        call = contender.prepare(buffers)
        if call is not None:
            count = arguments.iterations or here.clock.enough(call, arguments.warmup, buffers.reset, _ROUND_S, _FEWEST)
            ways[contender.name] = Way(call, count, buffers.reset)
    took = here.clock.take_turns(ways, arguments.rounds)
    found = {}
    for contender, buffers in entered:
        if contender.name not in ways:
            continue
        wrong = None
        if contender.name != "memcpy":
            buffers.fill()
            ways[contender.name].call()
            wrong = here.sum(buffers.count_wrong(spoils_inputs=contender.name == "gloo"))
        rounds = [statistics.median(each) for each in took[contender.name]]
        seconds = [second for each in took[contender.name] for second in each]
        point = buffers.point(seconds, contender.algorithm(buffers), wrong)
        found[contender.name] = Measured(dataclasses.replace(point, median_s=statistics.median(rounds)), rounds)
    return found
