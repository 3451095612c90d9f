from __future__ import annotations

from harness.launcher import job


def test_an_error_inside_backward_on_one_rank_ends_the_job_with_its_reason() -> None:
    done = job("ddp", "fail", ranks=3)
    assert done.rc != 0 and "came to the end" not in done.stdout, done
    assert "ZeroDivisionError: inside backward" in done.stderr and "[rank 1/3" in done.stderr, done
