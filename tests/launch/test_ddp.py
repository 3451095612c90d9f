from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.launcher import mpirun

PROGRAM = """
import sys
import numpy as np
import mpiddp as dist
from mpiddp import nn

dist.init_process_group()
ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), bucket_cap_mb=0.00001)

def fail(gradient):
    if dist.get_rank() == 1 and sys.argv[1] == "fail":
        raise ZeroDivisionError("inside backward")

ddp.module[0].weight.register_hook(fail)
for step in range(3):
    ddp(np.ones((2, 4), np.float32)).sum().backward()
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
print("came to the end", flush=True)
"""


def test_an_error_inside_backward_on_one_rank_ends_the_job_with_its_reason() -> None:
    job = mpirun(3, PROGRAM, "fail", timeout_s=60)
    assert job.rc != 0, job
    assert "came to the end" not in job.stdout, job
    assert "ZeroDivisionError: inside backward" in job.stderr, job
    assert "[rank 1/3" in job.stderr, job


@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_the_environment_alone_makes_a_trace(tmp_path: Path, end: str) -> None:
    path = tmp_path / "trace.json"
    job = mpirun(2, PROGRAM, end, timeout_s=60, env={"MPIDDP_TIMELINE": str(path)})
    assert job.rc == 0, job
    assert job.stdout.count("came to the end") == 2, job
    assert "exposed ms" in job.stderr, job
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        assert [event["name"] for event in spans if event["pid"] == rank].count("backward") == 3
