from __future__ import annotations

from harness.launcher import mpirun


def test_ranks_that_ask_for_different_algorithms_are_both_named():
    program = """
import numpy as np
import mpiddp as dist
dist.init_process_group(timeout=20)
dist.all_reduce(np.ones(10), algorithm="ring" if dist.get_rank() else None)
dist.barrier()
"""
    done = mpirun(2, program)
    assert done.rc != 0, done
    assert "rank 0 calls all_reduce #" in done.stderr and "rank 1 calls all_reduce by ring #" in done.stderr, done


def test_half_sums_on_pretended_nodes_are_rounded_once():
    program = """
import numpy as np
import mpiddp as dist
dist.init_process_group()
rank = dist.get_rank()
for make in (np.empty, dist.symmetric_empty):
    x = make(50_000, np.float16)
    x[...] = 2.0 ** (10 if rank < 2 else -10)
    dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    assert (x == 1).all(), x
    x[...] = 2048 if rank == 0 else 1
    dist.all_reduce(x)
    assert (x == np.float16(2051)).all(), x
"""
    done = mpirun(4, program, env={"MPIDDP_NODES": "0,0,1,1"})
    assert done.rc == 0, done
