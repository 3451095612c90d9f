import pytest
from harness.launcher import job, start

pytestmark = pytest.mark.core

LINES, RANKS = 300, 3


def test_printed_lines_stay_whole():
    done = job("prints", LINES, ranks=RANKS, PYTHONUNBUFFERED="1")
    assert done.rc == 0, done
    wanted = {f"rank {rank} has {line} {'x' * (line % 90)} end" for rank in range(RANKS) for line in range(LINES)}
    assert sorted(done.stdout.splitlines()) == sorted(wanted)


def test_a_print_appears_at_once():
    with start("prints", 0, ranks=2) as job:
        for rank in range(2):
            job.wait_for(f"first from {rank}", 25)
        assert job.poll() is None
