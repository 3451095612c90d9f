"""Rows of the table, said by rank 0, and times that mean something on a GPU."""

import json
import statistics
import sys
import time
from collections.abc import Callable

import cupy

import mpiddp as dist


def say(what: str, value: float | None = None, unit: str = "", *, least: float | None = None, most: float | None = None,
        wrong: bool = False) -> None:  # fmt: skip
    """Say a row: a value, and the goal that it has at least or at most to reach."""
    row: dict[str, object] = {"what": what}
    if value is not None:
        row |= {"value": value, "unit": unit}
        goal = least if least is not None else most
        if goal is not None:
            row |= {"goal": goal, "sense": ">=" if least is not None else "<="}
            row["met"] = value >= goal if least is not None else value <= goal
    if wrong:
        row["wrong"] = True
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(f"ROW: {json.dumps(row)}\n")
        sys.stdout.flush()


def everywhere(right: object) -> bool:
    """Return the conjunction over all ranks, each of which calls: rank 0 says it."""
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, bool(right))
    return all(everybody)


def seconds(call: Callable[[], object], repeats: int, *, together: bool = True) -> float:
    """Return the median time of a call, all ranks beginning together, of the rank that takes longest."""
    taken = []
    for _ in range(repeats + 1):
        cupy.cuda.Device().synchronize()
        if together:
            dist.barrier()
        began = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        taken.append(time.perf_counter() - began)
    middle = statistics.median(taken[1:])  # the first warms up
    if not together:
        return middle
    everybody: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everybody, middle)
    return max(everybody)
