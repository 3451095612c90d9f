"""Ranks that start processes: ``children.py CASE METHOD`` with multiprocessing, or ``children.py commands MPIEXEC``."""

import multiprocessing
import subprocess
import sys

import numpy as np

import mpiddp as dist

case, how = sys.argv[1:]
if case != "spawn":
    dist.init_process_group()  # again in every child that imports this file


def nothing():
    pass


def run(rank, size):
    dist.init_process_group(rank=rank, world_size=size)
    dist.all_reduce(np.ones(1))
    print("went on", flush=True)


def start_commands():
    code = "import mpiddp as dist; dist.init_process_group(); print('world of', dist.get_world_size(), flush=True)"
    child, own = [sys.executable, "-c", code], dist.settings.outside_of_jobs()
    starts = {
        "child": (child, {}),
        "with files": (child, {"close_fds": False}),
        "by a shell": (f'{sys.executable} -c "{code}"; exit $?', {"shell": True}),
        "alone": (child, {"env": own}),
        "job": ([how, "-n", "2", *child], {"env": own}),
        "raises": ([sys.executable, "-c", "import mpiddp; 1 / 0"], {}),
    }
    for name, (command, options) in starts.items():
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        last = done.stderr.splitlines()[-1:]
        sys.stdout.write(f"{name}: {done.returncode} {done.stdout.split()} {'[rank' in done.stderr} {last}\n")


if case == "pool":
    lock = multiprocessing.get_context(how).Lock()
    print(lock._semlock.name, flush=True)  # type: ignore[attr-defined]
    with multiprocessing.get_context(how).Pool(2) as pool:
        print(pool.map(abs, range(4)))
if __name__ == "__main__":
    match case:
        case "spawn":
            multiprocessing.set_start_method(how)
            ranks = [multiprocessing.Process(target=run, args=(rank, 2)) for rank in range(2)]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()
        case "process" if dist.get_rank() == 0:
            multiprocessing.set_start_method(how)
            child = multiprocessing.Process(target=nothing)
            child.start()
            child.join()
            print(f"the child failed: {child.exitcode != 0}", flush=True)
        case "commands" if dist.get_rank() == 1:
            start_commands()
    if case != "spawn":
        x = np.ones(1)
        dist.all_reduce(x)
        sys.stdout.write(f"sum {x[0]}\n")
