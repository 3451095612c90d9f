"""The schedules of the example ``collective_costs`` as real messages: all ranks end as they must."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness import launcher

from mpiddp.examples import collective_costs as costs

pytestmark = pytest.mark.once


def test_schedules_are_right_as_real_messages():
    tests = Path(__file__).parents[1]
    path = [str(tests), *launcher.environment().get("PYTHONPATH", "").split(os.pathsep)]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    program = tests / "launch" / "measure_costs.py"
    done = launcher.mpirun(8, program, "--rank", "--schedules", "--size", "64000", env=env, timeout_s=120)
    assert done.rc == 0, done
    names = {name for name, _, ranks_per_machine in costs.table() if ranks_per_machine == 1 and "mpiddp" not in name}
    assert set(json.loads(done.stdout)) == names | {"mpiddp.broadcast", "mpiddp.reduce", "mpiddp.all_reduce"}
