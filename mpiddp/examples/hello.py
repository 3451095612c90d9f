"""``MPIDDP_NODES=0,0,1,1 mpirun -np 4 python -m mpiddp.examples.hello``: every rank says who it is.

mpirun starts the same program four times. Each of these processes is a *rank*: they run the same lines and differ in
nothing but their number, which ``get_rank`` tells. The *local rank* counts the ranks of one machine (node), and is what
one chooses a GPU by. ``MPIDDP_NODES`` pretends that ranks 0 and 1 run on one node, 2 and 3 on another; leave it out,
and the nodes are those that the ranks run on.

Output::

    rank 0 of 4 is local rank 0 on its node
    rank 1 of 4 is local rank 1 on its node
    rank 2 of 4 is local rank 0 on its node
    rank 3 of 4 is local rank 1 on its node
"""

from __future__ import annotations

import mpiddp as dist
from mpiddp.examples.printing import print_in_order


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    print_in_order(f"rank {rank} of {size} is local rank {dist.get_node_local_rank()} on its node")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
