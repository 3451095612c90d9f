"""Print the names of MPI's shared memory, and fail on all ranks."""

from pathlib import Path

import mpiddp as dist

dist.init_process_group()
maps = Path("/proc/self/maps").read_text().splitlines()
names = {line.split()[-1] for line in maps if "/dev/shm/" in line and "mpiddp" not in line}
print(*names, sep="\n", flush=True)
dist.barrier()
raise ValueError("boom")
