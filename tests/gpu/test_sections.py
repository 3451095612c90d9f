"""``python -m tests.gpu --fake``: the one command for a machine with a GPU runs, tells, and ends."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from harness import launcher
from harness.launcher import job

from gpu import sections
from gpu.__main__ import table

pytestmark = [pytest.mark.once, pytest.mark.skipif(launcher.mpiexec() is None, reason=launcher.NO_MPIEXEC)]
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


def test_the_limits_fit_the_budget() -> None:
    runs = [section.limit_s * (2 if section.ranks is None else 1) for section in sections.SECTIONS.values()]
    assert sum(runs) <= sections.BUDGET_S < 10 * 60
    assert sections.SECTIONS["probe"].limit_s > 2 * sections.PROBE_LIMIT_S


def test_a_row_of_several_lines_is_one_row_of_the_table() -> None:
    row = {"section": "train", "ranks": 2, "what": "exit code 1: first\n  second", "wrong": True}
    assert table([row]).splitlines()[2:] == ["| train | 2 | exit code 1: first second |  |  | WRONG |"]


def test_a_row_is_there_before_its_job_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    script, started = 'import time; print(\'ROW: {"what": "first"}\', flush=True); time.sleep(60)', []

    def start(*_, start=launcher.start, **how):
        started.append(start("-c", script))
        return started[0]

    monkeypatch.setattr(sections.launcher, "start", start)
    rows = sections.run(sections.SECTIONS["order"], "order", 2, fake=True, small=True, limit_s=5)
    assert next(rows)["what"] == "first" and started[0].poll() is None
    rest = list(rows)
    assert [row["what"][:15] for row in rest] == ["not done in 5 s"] and rest[0]["wrong"]
    assert started[0].poll() is not None


def test_a_job_that_fails_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so: not found')\n")
    done = job(*GPU, "order", "--small", "--budget", 60, search=[tmp_path], limit_s=90, **HOW)
    assert done.rc == 1
    assert "exit code" in done.stdout and "libcudart.so: not found" in done.stdout and "WRONG" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_one_line_says_what_is_missing() -> None:
    done = job(*GPU, **HOW)
    assert done.rc == 1 and done.stdout == ""
    assert done.stderr == "this needs CuPy and a GPU: pip install '.[cuda12]' or '.[cuda13]', or try it with --fake\n"
