"""``python -m tests.gpu --fake``: that the one command for a machine with a GPU runs, tells, and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import launcher

pytestmark = pytest.mark.skipif(launcher.mpiexec() is None, reason=launcher.NO_MPIEXEC)
ROOT = Path(__file__).resolve().parents[2]


def environment(*folders: Path) -> dict[str, str]:
    """Return the environment of somebody in the checkout, who runs ``tests.gpu`` from there."""
    return launcher.environment({"PYTHONSAFEPATH": None, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))})


def test_sections_run_on_the_fake_device(tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")  # of the fake
    rows_file = tmp_path / "out" / "rows.json"
    names = ["machine", "order", "ipc", "staged", "dlpack"]
    command = [sys.executable, "-m", "tests.gpu", *names, "--fake", "--ranks", "2", "--json", str(rows_file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(rows_file.read_text())
    assert {row["section"] for row in rows} == set(names)
    assert not [row for row in rows if row.get("wrong")]
    assert any(row.get("goal") == 0.6 and "met" in row for row in rows)
    assert done.stdout.count("| section | ranks |") == 1


def test_a_job_that_fails_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so: not found')\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "order", "--small", "--budget", "60"],
        cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "exit code" in done.stdout and "libcudart.so: not found" in done.stdout and "WRONG" in done.stdout
