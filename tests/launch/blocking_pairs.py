"""Jobs whose last rank makes another blocking call: ``PYTHONPATH=.:tests python -m launch.blocking_pairs``.

Each pair of calls is a job of one node, which has to end with exit code 111 and the names of both calls. Prints the
jobs that do not.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from harness.launcher import Completed, mpirun

SAME = {"reduce_scatter", "reduce_scatter_single"}
"""Of long arrays they are one operation, as in torch, and match."""
CALLS = {
    "all_reduce": "dist.all_reduce(x)",
    "broadcast": "dist.broadcast(x, 0)",
    "reduce": "dist.reduce(x, 0)",
    "all_gather": "dist.all_gather(rows, x)",
    "all_gather_single": "dist.all_gather_single(table, x)",
    "reduce_scatter": "dist.reduce_scatter(x, rows)",
    "reduce_scatter_single": "dist.reduce_scatter_single(x, table)",
    "gather": "dist.gather(x, rows if rank == 0 else None, 0)",
    "scatter": "dist.scatter(x, rows if rank == 0 else None, 0)",
    "all_to_all": "dist.all_to_all(rows, [x] * size)",
    "all_to_all_single": "dist.all_to_all_single(table, table.copy())",
    "barrier": "dist.barrier()",
    "symmetric_empty": "dist.symmetric_empty(x.size)",
    "new_group": "dist.new_group()",
    "broadcast_object_list": "dist.broadcast_object_list(['x' * x.size], 0)",
    "all_gather_object": "dist.all_gather_object([None] * size, 'x' * x.size)",
}
_PROGRAM = """
import numpy as np
import mpiddp as dist

dist.init_process_group(timeout=20)
rank, size = dist.get_rank(), dist.get_world_size()
x = np.ones({elements})
rows, table = [x.copy() for _ in range(size)], np.ones({elements} * size)
if rank == size - 1:
    {other}
else:
    {one}
dist.barrier()
print("went on")
"""
_LIMIT_S = 60.0


class Case(NamedTuple):
    """A job: the call of most ranks, that of the last one."""

    one: str
    other: str
    elements: int
    ranks: int

    def run(self) -> Completed:
        program = _PROGRAM.format(one=CALLS[self.one], other=CALLS[self.other], elements=self.elements)
        return mpirun(self.ranks, program, timeout_s=_LIMIT_S, env={"OMP_NUM_THREADS": "1"})


def names_both(case: Case, job: Completed) -> bool:
    """Return True if the job ended with the names of both calls, and nobody went on."""
    named = all(re.search(rf" calls {name} #1[ ,;]", job.stderr) for name in (case.one, case.other))
    return job.rc == 111 and "disagree: rank" in job.stderr and named and "went on" not in job.stdout


def cases(elements: list[int], ranks: list[int]) -> list[Case]:
    """Return all ordered pairs of different calls, in a random order that is always the same."""
    pairs = [pair for pair in itertools.permutations(CALLS, 2) if set(pair) != SAME]
    found = [Case(*pair, *at) for pair in pairs for at in itertools.product(elements, ranks)]
    random.Random(0).shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[8, 1 << 16, 1 << 20], help="float64, of an array")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--last", type=int, help="number after that of the last job")
    parser.add_argument("--at-once", type=int, default=2, help="jobs side by side")
    given = parser.parse_args()
    chosen = cases(given.elements, given.ranks)[given.first : given.last]
    missed = 0
    with ThreadPoolExecutor(given.at_once) as pool:
        for done, (case, job) in enumerate(zip(chosen, pool.map(Case.run, chosen), strict=True), 1):
            if not names_both(case, job):
                missed += 1
                print(f"missed: {case}\nexit code {job.rc}\n{job.stdout}{job.stderr}", flush=True)
            if done % 100 == 0:
                print(f"{done} of {len(chosen)} pairs, {missed} missed", flush=True)
    print(f"{len(chosen)} pairs, {missed} missed", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
