"""Runs other scripts for torchrun in one job, for importing torch takes longer than they do: FOLDER NAME:PORT..."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # torchrun's store keeps what the script before has set
    for each in sys.argv[2:]:
        name, os.environ["MASTER_PORT"] = each.split(":")
        if os.environ["RANK"] == "0":
            print(f"-- {name}", flush=True)
        runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
