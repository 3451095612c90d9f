"""The sections: those that are right or wrong as tests; and with ``--fake`` the command runs, tells, and ends."""

import json
from pathlib import Path

import pytest
from harness import launcher

from mpiddp.device import cuda_fault

from . import sections

RUNS = [(name, each.ranks or 2) for name, each in sections.SECTIONS.items() if each.is_test]


@pytest.mark.skipif(cuda_fault() is not None, reason=f"needs a GPU: {cuda_fault()}")
@pytest.mark.parametrize(("name", "ranks"), [*RUNS, ("correctness", 4)])
def test_section(name: str, ranks: int) -> None:
    section = sections.SECTIONS[name]
    rows = list(sections.run(section, name, ranks, fake=False, small=True, limit_s=section.limit_s))
    assert rows, "the job said nothing"
    assert not [row for row in rows if row.get("wrong")], rows


def test_sections_run_on_the_fake_device(tmp_path: Path) -> None:
    rows_file = tmp_path / "out" / "rows.json"
    names = ["machine", "probe", "staged", "pointers", "nccl", "nodes", "order", "dlpack"]
    options = (*names, "--fake", "--ranks", 2, "--json", rows_file)
    done = launcher.job("-m", "tests.gpu", *options, limit_s=300, cwd=sections.ROOT, PYTHONSAFEPATH=None)
    assert done.rc == 0, done
    rows = json.loads(rows_file.read_text())
    assert {row["section"] for row in rows} == set(names)
    assert not [row for row in rows if row.get("wrong")]
    assert any(row.get("goal") == 0.8 and "met" in row for row in rows)
    assert done.stdout.count("| section | ranks |") == 1
    assert "NCCL, all_reduce of 1 MiB" in done.stdout and "device_ring, all_reduce of 1 MiB" in done.stdout
