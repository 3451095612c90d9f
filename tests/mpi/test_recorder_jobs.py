"""The flight recorder of jobs that hang: all ranks write it, and `flight` finds where they part."""

import re
from functools import partial
from pathlib import Path

import pytest
from harness.launcher import job, side_by_side

NEVER = "never began #6; last all_reduce #5 of 200000 float64 elements with SUM, which has ended\n"
# Exit code, and what rank 1 does.
CASES = {
    "missing": (110, NEVER),
    "mismatch": (111, "broadcast #6 of 4 float64 elements and group rank 0 as root, which "),
    "error": (1, NEVER),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorder")


@pytest.fixture(scope="module")
def jobs(folder):
    files = {case: f"{folder}/{case}/rank_" for case in CASES}
    started = partial(job, "parting", ranks=3, MPIDDP_TIMEOUT="5")
    calls = {case: partial(started, case, MPIDDP_FLIGHT_RECORDER=files[case]) for case in CASES}
    with side_by_side(calls) as futures:
        yield futures


@pytest.mark.parametrize("case", CASES)
def test_every_rank_writes_and_flight_finds_where_they_part(jobs, folder, case) -> None:
    done, (code, found) = jobs[case].result(), CASES[case]
    assert done.rc == code or case == "error", done
    prefix = f"{folder}/{case}/rank_"
    said = f"flight recorder: 3 of 3 ranks wrote {prefix}*; `python -m mpiddp flight {prefix}*` shows"
    assert said in done.stderr, done
    files = sorted((folder / case).iterdir())
    assert [path.name for path in files] == ["rank_0", "rank_1", "rank_2"]
    read = job("-m", "mpiddp", "flight", *files)
    found = rf"part at #6\n    rank 1 \(node \S+, pid \d+\)  +parting.py:\d+ in \S+ +{found}"
    assert re.search(found, read.stdout), read
    assert "group 1." in read.stdout and ": all made the same calls up to #1, and all have ended" in read.stdout, read
