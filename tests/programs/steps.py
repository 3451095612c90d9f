"""Ten steps, saved one by one: ``steps.py FOLDER EVENT``; in the first start something happens after the fifth."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

import mpiddp as dist

folder, event = pathlib.Path(sys.argv[1]), sys.argv[2]
dist.init_process_group()
me = dist.get_rank()
state = dist.load(folder / "state") if (folder / "state").exists() else {"step": 0, "sum": np.zeros(3)}
again = (folder / "again").exists()
dist.barrier()
while state["step"] < 10:
    if event == "always" and state["step"] == 5 and me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.full(3, state["step"] + me, np.float64)
    dist.all_reduce(x)
    state = {"step": state["step"] + 1, "sum": state["sum"] + x}
    if me == 0:
        dist.save(state, folder / "state")
        print("step", state["step"], flush=True)
    dist.barrier()
    if state["step"] == 5 and not again:
        if me == 0:
            (folder / "again").touch()
        dist.barrier()
        if event == "raise" and me == 0:
            raise RuntimeError("not today")
        if event == "kill" and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "leave":
            if me == 0:  # a job of its own, which ends well
                code = "import mpiddp; mpiddp.init_process_group()"
                subprocess.run([sys.executable, "-c", code], env=dist.settings.outside_of_jobs(), check=True)
            dist.barrier()
            if me == 1:
                os._exit(0)
        if event == "stop" and me == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        if event in ("wait", "network"):
            print("waits", flush=True)
            time.sleep(60 if event == "wait" else 3)
if me == 0:
    print("sum", *state["sum"], flush=True)
