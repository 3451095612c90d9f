"""One section, as every rank of its job runs it: ``python -m tests.gpu.job NAME [--small]``."""

import importlib
import os
import sys

from mpiddp import launchers

from .sections import SECTIONS


def main(name: str, small: bool) -> None:
    import cupy  # noqa: F401 - before MPI starts, so that it does so with this rank's GPU current

    announced = launchers.launch()
    if announced:
        os.environ["FAKE_GPU_UUID"] = str(announced.rank)  # with --fake each rank has a GPU of its own

    section = getattr(importlib.import_module(f".{SECTIONS[name].module}", __package__), name)
    if SECTIONS[name].alone or not SECTIONS[name].group:
        section(small)
        return
    import mpiddp as dist

    dist.init_process_group()
    section(small)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], "--small" in sys.argv)
