import pytest
from harness.launcher import ULFM, is_open_mpi, job


@pytest.mark.parametrize(
    "scenarios",
    [
        "two_sources_uneven stranger strange_sample slow_trainer trainer_stops next_stream",
        "intercommunicator state mistakes silent_source nothing_comes",
        "refusals two_at_once no_end group_beside group_ends_first",
    ],
    ids=["streams", "faults", "strange users"],
)
def test_streams_of_plain_mpi4py(scenarios):
    ranks, names = 4 if "refusals" in scenarios else 3, scenarios.split()
    warn_after = "0.3" if "silent_source" in names else None
    done = job("stream", *names, ranks=ranks, limit_s=120, MPIDDP_WARN_AFTER=warn_after)
    assert done.rc == 0 and done.stdout.count("done: ") == len(names), done
    if "silent_source" in scenarios:
        warned = done.stderr.split("done: mistakes")[-1]
        assert "without progress.  Stream waits for source 1, silent for" in warned, done
        assert "after 1 samples" in warned, done
        assert "source 0, silent" not in warned, done


@pytest.mark.core
@pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI's mpirun lets ranks live on")
def test_a_source_that_is_killed_is_named():
    done = job("stream", "killed_source", ranks=3, options=ULFM, limit_s=60, OMPI_MCA_coll="^han,adapt")
    assert done.stdout.count("survived:") == 2 and done.stdout.count("told: Stream cannot receive") == 1, done
