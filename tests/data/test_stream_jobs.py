from __future__ import annotations

import pytest
from harness.launcher import job


@pytest.mark.parametrize(
    "scenarios",
    [
        ("one_source_two_trainers", "two_sources_uneven", "slow_trainer", "trainer_stops", "intercommunicator"),
        ("state", "mistakes", "silent_source", "nothing_comes"),
    ],
    ids=["streams", "faults"],
)
def test_streams_of_plain_mpi4py(scenarios):
    done = job("stream", *scenarios, ranks=3, MPIDDP_WARN_AFTER="0.3" if "silent_source" in scenarios else None)
    assert done.rc == 0 and done.stdout.count("done: ") == len(scenarios), done
    if "silent_source" in scenarios:
        warned = done.stderr.split("done: mistakes")[-1]
        assert "without progress.  Stream waits for source 1, silent for" in warned and "after 1 samples" in warned, (
            done
        )
        assert "source 0, silent" not in warned, done
