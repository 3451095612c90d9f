"""The sections that are right or wrong, as tests; ``python -m tests.gpu`` runs these and the measurements."""

from __future__ import annotations

import os

import pytest
from harness import launcher

from mpiddp.device import cuda_fault

from . import sections

pytestmark = [
    pytest.mark.skipif(launcher.announced_size() > 0 or launcher.PLAN in os.environ, reason="starts mpiexec itself"),
    pytest.mark.skipif(launcher.mpiexec() is None, reason=launcher.NO_MPIEXEC),
    pytest.mark.skipif(cuda_fault() is not None, reason=f"needs a GPU: {cuda_fault()}"),
]


RUNS = [(name, each.ranks or 2) for name, each in sections.SECTIONS.items() if each.is_test]


@pytest.mark.parametrize(("name", "ranks"), [*RUNS, ("correctness", 4)])
def test_section(name: str, ranks: int) -> None:
    section = sections.SECTIONS[name]
    rows = list(sections.run(section, name, ranks, fake=False, small=True, limit_s=section.limit_s))
    assert rows, "the job said nothing"
    assert not [row for row in rows if row.get("wrong")], rows
