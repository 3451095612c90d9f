"""Programs of torch as they are: with the entry points that pip lays down, by the runner, and torch's own suite."""

import importlib.util
import re
import tomllib
from functools import partial
from pathlib import Path

import pytest
from harness import launcher
from harness.launcher import job

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TORCH = ("-m", "mpiddp.torch")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
WORLD = {  # what else runs on torch.distributed: the package, and the scripts that use it
    "torch.nn": ("ddp_snapshot", "fsdp2", "tensor_parallel", "dcp", "wrappers"),
    "torch": ("pipeline", "meshes", "helpers_of_ddp", "beside_training"),
    "lightning": ("world_lightning",),
    "accelerate": ("world_accelerate",),
    "transformers": ("world_transformers",),
    "deepspeed": ("world_deepspeed",),
}


CASES = [pytest.param(package, ranks, marks=pytest.mark.long) for package in WORLD for ranks in (2, 4)]
CASES[0] = pytest.param("torch.nn", 2)


def losses_of(ended: launcher.Completed) -> list[list[str]]:
    """Return the lines of names and losses of each backend."""
    parts = re.split(r"^== .*$", ended.stdout, flags=re.MULTILINE)[1:]
    return [re.findall(r"^(?:--|loss) .*$", part, re.MULTILINE) for part in parts]


def figures(lines: list[str]) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.\d+", " ".join(lines))]


@pytest.mark.parametrize(("package", "ranks"), CASES)
def test_the_torch_world_has_gloo_s_losses(package: str, ranks: int, tmp_path: Path) -> None:
    """By the runner, unchanged, and by the backend's name. Gloo's processes may abort at their end."""
    pytest.importorskip(package)
    script, names = HERE / "scripts" / "one_after_another.py", WORLD[package]
    one = {"OMP_NUM_THREADS": "1", "limit_s": 600}
    by_runner = partial(job, *TORCH, script, tmp_path, ranks=ranks, **one)
    if package.startswith("torch"):
        calls = {"all": partial(by_runner, "unset,mpiddp,original", *names)}
    else:  # these keep a state of their own in a process
        calls = {
            "runner": partial(by_runner, "unset", *names),
            "name": partial(job, script, tmp_path, "mpiddp", *names, ranks=ranks, **one),
            "gloo": partial(job, *TORCHRUN, ranks, script, tmp_path / "gloo", "unset", *names, **one),
        }
    with launcher.side_by_side(calls) as jobs:
        ended = {way: jobs[way].result() for way in calls}
    assert all(each.rc == 0 for way, each in ended.items() if way != "gloo"), ended
    *ours, gloos = (lines for each in ended.values() for lines in losses_of(each))
    for lines in ours:
        if ranks == 2:
            assert lines == gloos, ended
        # Sums of four ranks depend on their order, which is another one.
        assert figures(lines) == pytest.approx(figures(gloos), rel=1e-5), ended
    assert len(ours) == 2 and len(gloos) > 2 * len(names), ended


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """Return the folders that show an installed mpiddp: its entry points, as pip lays them down."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    package = tmp_path / "mpiddp-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mpiddp\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [line for group, found in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in found.items()))]
    (package / "entry_points.txt").write_text("\n".join(lines))
    return [tmp_path]


FOUND = """
import contextlib, os, sys, torch, torch.distributed as dist
assert "mpi4py.MPI" not in sys.modules and "mpiddp.parallel" not in sys.modules
assert dist.is_backend_available("mpiddp")
rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
dist.init_process_group("gloo", sys.argv[1], rank=rank, world_size=size)
if rank == 0:
    with contextlib.suppress(dist.DistBackendError):
        dist.new_group([0], backend="mpiddp", use_local_synchronization=True)
        raise AssertionError("MPI has not started on rank 1")
for group in (dist.new_group(backend="mpiddp"), dist.group.WORLD):
    dist.all_reduce(x := torch.ones(1), group=group)
    assert x == 2
dist.destroy_process_group()
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(29600 + rank))
dist.init_process_group("mpiddp")
dist.all_reduce(x := torch.ones(1))
assert x == 2
dist.destroy_process_group()
dist.init_process_group("mpiddp", "tcp://nowhere:1", rank=rank, world_size=size)
print("right")
"""


def test_import_torch_finds_the_backend_and_starts_no_mpi(installed: list[Path], tmp_path: Path) -> None:
    """It stands beside Gloo, whose ranks have met at a file, and meets through MPI, whatever address is left."""
    ended = job(FOUND, f"file://{tmp_path}/meet", ranks=2, search=installed, limit_s=120)
    assert ended.rc == 0 and ended.stdout.count("right") == 2, ended
    assert ended.stderr.count("meet through MPI, not at MASTER_ADDR=localhost MASTER_PORT=29600") == 1, ended
    assert ended.stderr.count("meet through MPI, not at tcp://nowhere:1") == 1, ended
    assert "ran on Gloo in this job" not in ended.stderr, ended


def test_without_mpirun_is_a_world_of_one_rank(installed: list[Path]) -> None:
    code = (
        "import sys; sys.modules['torch.distributed._dist2'] = None\n"  # as before torch 2.9
        "import torch.distributed as dist; dist.init_process_group('mpiddp'); print('size', dist.get_world_size())"
    )
    ended = job("-c", code, search=installed, limit_s=120)
    assert ended.rc == 0 and "size 1" in ended.stdout, ended


def test_a_job_on_gloo_alone_says_so_at_its_end(installed: list[Path]) -> None:
    code = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.new_group(); dist.barrier()"
    ended = job("-c", code, ranks=2, search=installed, limit_s=120)
    assert ended.rc == 0 and ended.stderr.count("ran on Gloo in this job") == 1, ended


SPAWN = """
import os, torch.distributed as dist, torch.multiprocessing as mp
def run(rank, size):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=rank, world_size=size)
if __name__ == "__main__":
    mp.spawn(run, (1,), 1)
"""


def test_a_spawn_left_in_a_script_for_torchrun_is_named(installed: list[Path], tmp_path: Path) -> None:
    (script := tmp_path / "spawns.py").write_text(SPAWN)
    ended = job(*TORCH, script, ranks=2, search=installed, limit_s=120)
    assert ended.rc != 0 and "delete the spawn" in ended.stderr and "EADDRINUSE" not in ended.stderr, ended


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "passed"), [(3, 121), (4, 122)])
def test_torch_s_own_suite(ranks: int, passed: int) -> None:
    pytest.importorskip("expecttest", reason="torch's suite needs pip install expecttest")
    ended = job(HERE / "suite.py", "--ranks", ranks, limit_s=1200)
    assert ended.rc == 0 and f"{{'passed': {passed}}}" in ended.stdout, ended
