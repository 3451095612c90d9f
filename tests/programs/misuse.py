"""Calls before and after the process group are refused with torch's words."""

import numpy as np

import mpiddp as dist


def refuses(kind, text, call, *args):
    try:
        call(*args)
    except kind as error:
        assert text in str(error), error
    else:
        raise SystemExit(f"{call} went through")


x = np.ones(2)
missing = "Default process group has not been initialized, please make sure to call init_process_group."
refuses(ValueError, missing, dist.all_reduce, x)
refuses(AssertionError, "Process group cannot be None", dist.destroy_process_group)
dist.init_process_group()
refuses(ValueError, "trying to initialize the default process group twice!", dist.init_process_group)
group = dist.new_group([0])
dist.destroy_process_group()
refuses(AssertionError, "Process group cannot be None", dist.destroy_process_group)
refuses(ValueError, missing, dist.all_reduce, x)
refuses(ValueError, missing, dist.get_rank)
if isinstance(group, dist.ProcessGroup):
    refuses(ValueError, "destroyed", dist.all_reduce, x, dist.ReduceOp.SUM, group)
dist.init_process_group()
dist.all_reduce(x)
assert x[0] == 2
