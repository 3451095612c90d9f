"""``python -m tests.gpu --fake``: the one command for a machine with a GPU runs, tells, and ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import launcher
from harness.launcher import job

pytestmark = pytest.mark.skipif(launcher.mpiexec() is None, reason=launcher.NO_MPIEXEC)
ROOT = Path(__file__).resolve().parents[2]


GPU = ("-m", "tests.gpu")
HOW = {"cwd": ROOT, "PYTHONSAFEPATH": None}


@pytest.mark.long
def test_sections_run_on_the_fake_device(tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")  # of the fake
    rows_file = tmp_path / "out" / "rows.json"
    names = ["machine", "probe", "staged", "pointers", "nccl", "nodes", "order", "dlpack"]
    done = job(*GPU, *names, "--fake", "--ranks", 2, "--json", rows_file, limit_s=300, **HOW)
    assert done.rc == 0, done
    rows = json.loads(rows_file.read_text())
    assert {row["section"] for row in rows} == set(names)
    assert not [row for row in rows if row.get("wrong")]
    assert any(row.get("goal") == 0.8 and "met" in row for row in rows)
    assert done.stdout.count("| section | ranks |") == 1
    assert "NCCL, all_reduce of 1 MiB" in done.stdout and "device_ring, all_reduce of 1 MiB" in done.stdout
