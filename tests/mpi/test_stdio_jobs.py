from __future__ import annotations

import pytest
from harness.launcher import job, start

LINES, RANKS = 300, 3


@pytest.mark.parametrize("unbuffered", [None, "1"])
def test_printed_lines_stay_whole(unbuffered):
    done = job("prints", LINES, ranks=RANKS, PYTHONUNBUFFERED=unbuffered)
    assert done.rc == 0, done
    wanted = {f"rank {rank} has {line} {'x' * (line % 90)} end" for rank in range(RANKS) for line in range(LINES)}
    assert sorted(done.stdout.splitlines()) == sorted(wanted)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_print_appears_at_once(when):
    with start("prints", when, ranks=2) as job:
        for rank in range(2):
            job.wait_for(f"first from {rank}", 25)
        assert job.poll() is None
