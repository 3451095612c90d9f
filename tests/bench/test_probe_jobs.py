"""``python -m mpiddp info --probe-gpu`` and its effect on later jobs; the device is a fake."""

import json
from pathlib import Path

import pytest
from harness.faking import FOLDER
from harness.launcher import Completed, job


def info(cache: Path, *options: str, fake: bool = True) -> Completed:
    return job("-m", "mpiddp", "info", "--json", *options, search=[FOLDER] * fake, MPIDDP_CACHE=str(cache))


def test_what_the_probe_finds_is_known_to_later_jobs(tmp_path: Path) -> None:
    said = info(tmp_path, "--probe-gpu")
    assert said.rc == 0, said.stderr
    found = json.loads(said.stdout)["mpi"]
    assert found["device_pointers"]["point_to_point"]["yes"], found["device_pointers"]
    assert found["device_pointers"]["point_to_point"]["reason"].startswith("a probe tried it (2 ranks on one node, ")
    assert found["device_pointers"]["collectives"]["yes"] == (not found["library"].startswith("Open MPI"))
    assert len(list(tmp_path.iterdir())) == 1

    later = json.loads(info(tmp_path).stdout)["mpi"]
    assert later["device_pointers"] == found["device_pointers"]


def test_without_a_gpu_there_is_nothing_to_try(tmp_path: Path) -> None:
    said = info(tmp_path, "--probe-gpu", fake=False)
    if said.rc == 0:
        pytest.skip("there is a GPU")
    assert said.rc == 2
    assert "mpiddp: error: --probe-gpu: the job that tries device pointers could not do it: CuPy" in said.stderr
    assert not list(tmp_path.iterdir())
