"""``mpirun -np 4 python -m mpiddp.examples.barrier``: nobody goes on before all have come.

Ranks run at their own speed. A barrier is where they meet: who comes early waits. It sends no data, and one needs it
less often than one thinks, because every other collective waits for the data that it needs.

Output::

    rank 0 came after 0.0 s of work
    rank 1 came after 0.1 s of work
    rank 2 came after 0.2 s of work
    rank 3 came after 0.3 s of work
    did everybody come before anybody left? True
"""

from __future__ import annotations

import time

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    work_s = 0.1 * rank
    time.sleep(work_s)
    came = time.monotonic()  # one clock for all ranks of a machine
    dist.barrier()
    left = time.monotonic()

    print_in_order(f"rank {rank} came after {work_s:.1f} s of work")
    times = [(0.0, 0.0)] * size
    dist.all_gather_object(times, (came, left))
    last_came = max(came for came, _ in times)
    first_left = min(left for _, left in times)
    print_once(f"did everybody come before anybody left? {last_came <= first_left}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
