"""Jobs in which one rank calls something else: ``python -m tests.measure.disagreeing [--trials 100]``.

A job makes some asynchronous trials, each in a group of its own, behind calls that are pending, and caught, and then a
blocking one, its last call. A third of the jobs make all trials in guests (``init_process_group(comm=...)``) instead,
where every error is caught. Operations, sizes, dtypes, reductions, roots, groups and nodes are drawn from the trial's
number. Right is a MismatchError with both calls on every rank of the group, and nothing else. Prints the trials that
are not.
"""

import argparse
import contextlib
import json
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import hosts
from harness.collectives import COLLECTIVES, OF_ONE_BLOCK, Submitted
from harness.launcher import announced_size, job

import mpiddp as dist

_LIMIT_S = 120.0
_CAUGHT = 6
"""Trials of a job before its last call."""
_NODES = ("0,0", "0,1", "0,0,0", "0,0,1", "0,1,1", "0,1,2")
_SIZES = (1, 6, 7, 31, 33, 100, 1203, 9_000, 20_000, 70_000, 330_403)
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "all_reduce_coalesced")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_OF_ONE_SIZE = (*_REDUCING, "broadcast", "all_gather", "all_gather_single")
_MOVING = ("gather", "scatter", "all_to_all", "all_to_all_single")
"""Whose sizes may differ between ranks."""
_CAUGHT_CALLS = (*_OF_ONE_SIZE, *_MOVING, "barrier")
_BLOCKING_CALLS = ("tree_all_reduce", "all_gather_object", "broadcast_object_list", "symmetric_empty", "new_group")


class Call(NamedTuple):
    name: str
    count: int
    dtype: str
    op: str
    root: int

    def seen(self) -> tuple[object, ...]:
        """Return what the ranks compare."""
        sized = self.name in (*_OF_ONE_SIZE, "tree_all_reduce", "symmetric_empty")
        typed = sized or self.name in _MOVING
        return (
            self.name,
            self.count if sized else 0,
            self.dtype if typed and self.name != "symmetric_empty" else "",
            self.op if self.name in _REDUCING else "",
            self.root if self.name in _ROOTED else 0,
        )


class Trial(NamedTuple):
    members: tuple[int, ...]
    odd: int
    one: Call
    other: Call


def _drawn_call(rng: random.Random, names: tuple[str, ...], size: int) -> Call:
    op = rng.choice(["SUM", "MAX", "PRODUCT"])
    return Call(rng.choice(names), rng.choice(_SIZES), rng.choice(["f4", "f8", "i4", "i8"]), op, rng.randrange(size))


def drawn(rng: random.Random, ranks: int, names: tuple[str, ...], *, in_world: bool = False) -> Trial:
    """Draw two calls of which about half differ in one respect only."""
    members = tuple(range(ranks)) if in_world else tuple(sorted(rng.sample(range(ranks), rng.randint(2, ranks))))
    while True:
        one, other = (_drawn_call(rng, names, len(members)) for _ in range(2))
        if rng.random() < 0.6:
            field = rng.choice(["count", "dtype", "op", "root"])
            other = one._replace(**{field: getattr(other, field)})
        if one.seen() != other.seen():
            return Trial(members, rng.choice(members), one, other)


def _drawn_pending(rng: random.Random) -> list[int]:
    """Draw the sizes of calls that are pending."""
    return [rng.choice(_SIZES) for _ in range(rng.choice([0, 0, 1, 3]))]


def _made(call: Call, group: Any, *, later: bool) -> Any:
    size, n, op = group.size(), call.count, getattr(dist.ReduceOp, call.op)
    given: dict[str, Any] = {"group": group, "async_op": later}
    if call.name in COLLECTIVES:
        row = [np.ones(n, call.dtype)] * (1 if call.name in OF_ONE_BLOCK else size)
        ranks = dist.get_process_group_ranks(group)
        at = Submitted(group.rank(), [row] * size, call.root, op, given, np.asarray, dist, ranks)
        COLLECTIVES[call.name](at)
        return at.returned
    x = np.ones(n, call.dtype)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([x, x[:1].copy()], op, **given),
        "barrier": lambda: dist.barrier(**given),
        "tree_all_reduce": lambda: dist.tree_all_reduce({"a": x}, group=group),
        "all_gather_object": lambda: dist.all_gather_object([None] * size, "x" * n, group),
        "broadcast_object_list": lambda: dist.broadcast_object_list(["x" * n], group=group, group_src=0),
        "symmetric_empty": lambda: dist.symmetric_empty(n, group=group),
        "new_group": lambda: dist.new_group(),
    }
    return calls[call.name]()


def names_both(trial: Trial, text: str) -> bool:
    named = (re.search(rf" calls {each.name} #\d+[ ,;]", text) for each in (trial.one, trial.other))
    return "disagree: rank" in text and all(named)


def _caught(trial: Trial, rank: int, pending: list[int], *, guest: bool) -> str:
    """Make a trial's call behind sums of these sizes, and destroy its group; return what is wrong."""
    from mpi4py import MPI

    inside = rank in trial.members
    part = MPI.COMM_WORLD.Split(0 if inside else MPI.UNDEFINED) if guest else MPI.COMM_NULL
    group = None if guest else dist.new_group(list(trial.members))
    if not inside:
        return ""
    if guest:
        dist.init_process_group(comm=part, timeout=20)
        group = dist.group.WORLD
    text = "nothing"
    try:
        sums = [np.ones(count) for count in pending]
        works = [dist.all_reduce(x, group=group, async_op=True) for x in sums]
        works.append(_made(trial.other if rank == trial.odd else trial.one, group, later=not guest or bool(pending)))
        for work in works[::-1]:
            if hasattr(work, "wait"):
                work.wait(*[20] * isinstance(work, dist.Work))
        if any((x != len(trial.members)).any() for x in sums):
            return f"{trial}: a call before it has a wrong sum"
        dist.destroy_process_group(group)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(dist.MismatchError, ValueError):  # destroyed already, or told again
        dist.destroy_process_group(group)
    if guest:
        part.Barrier()
    return "" if names_both(trial, text) else f"{trial}, pending {pending}: {text}"


def is_guest(seed: str) -> bool:
    return random.Random(f"{seed}, guest").random() < 1 / 3


def main_of_a_rank(seed: str) -> None:
    from mpi4py import MPI

    if is_guest(seed):
        rng, world = random.Random(seed), MPI.COMM_WORLD
        missed = []
        for _ in range(_CAUGHT + 1):
            trial = drawn(rng, world.size, _CAUGHT_CALLS + _BLOCKING_CALLS)
            pending = [] if {trial.one.name, trial.other.name} & set(_BLOCKING_CALLS) else _drawn_pending(rng)
            missed.append(_caught(trial, world.rank, pending, guest=True))
        print(f"caught: {json.dumps([each for each in missed if each])}", flush=True)
        return
    dist.init_process_group(timeout=40)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    missed = [_caught(drawn(rng, ranks, _CAUGHT_CALLS), rank, _drawn_pending(rng), guest=False) for _ in range(_CAUGHT)]
    print(f"caught: {json.dumps([each for each in missed if each])}", flush=True)
    dist.barrier()
    trial = last_of(seed, ranks)
    group = dist.group.WORLD
    if len(trial.members) < ranks:
        group = dist.new_group(list(trial.members))
    if rank in trial.members:
        _made(trial.other if rank == trial.odd else trial.one, group, later=False)


def last_of(seed: str, ranks: int) -> Trial:
    """Return the blocking trial, which asks of all ranks what only the default group can do."""
    rng = random.Random(f"{seed}, last")
    names = (*_CAUGHT_CALLS, *_BLOCKING_CALLS)
    trial = drawn(rng, ranks, names)
    whole = "new_group" in (trial.one.name, trial.other.name)
    return drawn(rng, ranks, names, in_world=True) if whole else trial


def run(seed: int, on: hosts.Hosts | None = None) -> str:
    """Run the job of a number; return what is wrong."""
    rng = random.Random(f"{seed}, nodes")
    nodes = rng.choice(_NODES)
    ranks = len(nodes.split(","))
    how: dict[str, Any] = {"MPIDDP_NODES": nodes}
    if on is not None:
        how = {"on": on.cyclic if rng.random() < 0.5 else on.block, "MPIDDP_NODES": None}
    file = Path(__file__)
    done = job(file, str(seed), ranks=ranks, search=file.parents[1:3], limit_s=_LIMIT_S, **how)
    said = [json.loads(line) for line in re.findall(r"caught: (\[.*\])$", done.stdout, re.MULTILINE)]
    trial = last_of(str(seed), ranks)
    where = f"{seed} on {'hosts' if on else nodes}"
    missed = [f"{where}: {each}" for told in said for each in told]
    if len(said) < ranks:
        missed.append(f"{where}, in the caught trials: {done}")
    elif is_guest(str(seed)):
        if done.rc != 0:
            missed.append(f"{where}, a guest: {done}")
    elif done.rc != 111 or not names_both(trial, done.stderr + done.stdout):
        missed.append(f"{where}, at the end: {trial}: {done}")
    return "\n".join(missed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100, help=f"{_CAUGHT + 1} a job")
    parser.add_argument("--hosts", action="store_true", help="on two network namespaces instead of made-up nodes")
    given = parser.parse_args()
    jobs = range(-(-given.trials // (_CAUGHT + 1)))
    with hosts.Hosts(2) if given.hosts else contextlib.nullcontext() as on, ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda seed: run(seed, on), jobs)
        missed = 0
        for wrong in found:
            missed += bool(wrong)
            print(wrong, end="\n" if wrong else "", flush=True)
    print(f"{len(jobs)} jobs, {len(jobs) * (_CAUGHT + 1)} trials, {missed} jobs with a miss", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    if announced_size():
        main_of_a_rank(sys.argv[1])
    else:
        main()
