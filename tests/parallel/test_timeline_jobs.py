import json
from pathlib import Path

from harness.launcher import job


def test_the_environment_alone_makes_a_trace(tmp_path: Path) -> None:
    """Also of a program that does not destroy its group."""
    path = tmp_path / "new" / "trace.json"
    done = job("ddp", ranks=2, MPIDDP_TIMELINE=str(path))
    assert done.rc == 0 and done.stdout.count("came to the end") == 2, done
    assert done.stderr.count(f"timeline written to {path}") == 1 and "exposed ms" in done.stderr, done
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        assert [event["name"] for event in spans if event["pid"] == rank].count("backward") == 3


def test_a_timeline_of_a_program_without_ddp_is_mentioned(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = job("endings", "all_reduce", ranks=2, MPIDDP_TIMELINE=str(trace))
    assert done.rc == 0 and not trace.exists(), done
    assert done.stderr.count("MPIDDP_TIMELINE traces the steps of DistributedDataParallel") == 1, done
