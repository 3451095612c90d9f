"""Print the variables that tell a rank who it is, early and late; without a launcher they are those of one rank."""

import json
import os
import sys

import mpiddp as dist

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
early = [int(os.environ.get(name, -1)) for name in NAMES]
assert "mpi4py.MPI" not in sys.modules and "numpy" not in sys.modules
assert early[0] == -1 or dist.get_node_local_rank() == early[2]
dist.init_process_group()
late = [int(os.environ[name]) for name in NAMES]
assert late == [dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()]
sys.stdout.write(json.dumps([early, late]) + "\n")
