"""The schedules of the example ``collective_costs`` as real messages: all ranks end as they must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.launcher import job

from mpiddp.examples import collective_costs as costs

pytestmark = pytest.mark.once


def test_schedules_are_right_as_real_messages():
    tests = Path(__file__).parents[1]
    program = tests / "measure" / "costs.py"
    done = job(program, "--rank", "--schedules", "--size", 64_000, ranks=8, search=[tests], limit_s=120)
    assert done.rc == 0, done
    names = {name for name, _, ranks_per_machine in costs.table() if ranks_per_machine == 1 and "mpiddp" not in name}
    assert set(json.loads(done.stdout)) == names | {"mpiddp.broadcast", "mpiddp.reduce", "mpiddp.all_reduce"}
