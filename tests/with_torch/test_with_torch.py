"""torch on mpiddp: jobs of their own, because torch's process group is the process's."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from harness import launcher
from harness.faking import FOLDER
from harness.launcher import job
from harness.tiers import thinned

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.core
@pytest.mark.parametrize("ranks", thinned([1, 2, 3], 3))
def test_backend(ranks: int) -> None:
    ended = job(HERE / "backend_job.py", ranks=ranks, search=[HERE.parent], limit_s=240)
    assert ended.rc == 0 and ended.stdout.count("all right") == ranks, ended


def test_torch_on_some_ranks(tmp_path: Path) -> None:
    ended = job(HERE / "guest_job.py", tmp_path / "end", ranks=3, search=[HERE.parent], limit_s=240)
    assert ended.rc == 0 and ended.stdout.count("all right") == 2, ended


@pytest.mark.parametrize("ranks", thinned([1, 2, 3], 2))
def test_cuda_tensors_go_as_cupy_arrays(ranks: int) -> None:
    """Tensors that only say so, on the fake device: there is no CUDA here."""
    warnings = {"PYTHONWARNINGS": "ignore:ranks"}
    ended = job(HERE / "cuda_job.py", ranks=ranks, search=[FOLDER, HERE.parent], limit_s=240, **warnings)
    assert ended.rc == 0 and ended.stdout.count("all right") == ranks, ended


@pytest.mark.parametrize("nodes", thinned(["0,0,0", "0,0,1"], "0,0,1"))
def test_other_backends_meet_through_mpi_and_nobody_else_does(nodes: str) -> None:
    """The store is at a Unix socket on one node, and else at a port."""
    ended = job(HERE / "gloo_job.py", ranks=3, search=[HERE.parent], limit_s=240, MPIDDP_NODES=nodes)
    assert ended.rc == 0 and ended.stdout.count("all right") == 3, ended


needs_ulfm = pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun lets ranks live on")


@pytest.mark.core
@needs_ulfm
def test_a_killed_rank_raises_on_the_others_and_training_goes_on() -> None:
    ended = job(SCRIPTS / "survive.py", ranks=3, options=launcher.ULFM, search=[HERE.parent], limit_s=120)
    raised = [line for line in ended.stdout.splitlines() if "RankFailedError of ranks [1]" in line]
    assert len(raised) == 2 and all(float(line.split()[-2]) < 10 for line in raised), ended
    assert ended.stdout.count("12 steps, 2 ranks, equal: True") == 2, ended


@pytest.mark.core
@needs_ulfm
def test_a_spare_takes_the_place_of_a_killed_rank_and_the_model_has_the_same_bits() -> None:
    ended = job(SCRIPTS / "elastic.py", ranks=3, options=launcher.ULFM, search=[HERE.parent], limit_s=240)
    assert ended.rc == 0 and ended.stdout.count("2 ranks, same bits: True") == 2, ended
    assert "rank 1 of 2 died; a spare took its place (0 left); going on after step 5" in ended.stderr, ended


def test_torch_s_own_shrink_group() -> None:
    if tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 15):
        pytest.skip("torch takes Backends written in Python since 2.15")
    ended = job(HERE / "shrink_job.py", ranks=4, limit_s=240)
    assert ended.rc == 0 and ended.stdout.count("all right") == 3, ended
