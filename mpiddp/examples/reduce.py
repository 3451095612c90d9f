"""``mpirun -np 4 python -m mpiddp.examples.reduce``: one rank gets the sum, the others keep their data.

Half of an all_reduce: where only one rank wants the result, to print it or to save it, nobody has to send it back.

Output::

    rank 0 had [1. 1. 1.], now has [10. 10. 10.]
    rank 1 had [2. 2. 2.], now has [2. 2. 2.]
    rank 2 had [3. 3. 3.], now has [3. 3. 3.]
    rank 3 had [4. 4. 4.], now has [4. 4. 4.]
"""

from __future__ import annotations

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_in_order


def main() -> None:
    """Run the example."""
    dist.init_process_group()
    rank = dist.get_rank()
    x = np.full(3, rank + 1.0)
    had = str(x)
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    print_in_order(f"rank {rank} had {had}, now has {x}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
