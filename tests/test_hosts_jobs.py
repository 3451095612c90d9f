"""Several hosts (see hosts): names, addresses, wires and memory that ends, which pretended nodes lack."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure.hosts as measure_hosts
import pytest
from harness import hosts, launcher
from harness.tiers import thinned

CHECKOUT = Path(__file__).parents[1]


fault = hosts.why_not()
needs_ulfm = pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun lets ranks live on")
pytestmark = pytest.mark.skipif(fault is not None, reason=f"no hosts to test with: {fault}")


@pytest.fixture(scope="module")
def two() -> Iterator[hosts.Hosts]:
    with hosts.Hosts(2) as made:
        yield made


def run(on: Callable[..., Any], ranks: int, *program: object) -> launcher.Completed:
    done = launcher.job(*program, ranks=ranks, on=on, search=[CHECKOUT / "tests"], limit_s=90)
    assert done.rc == 0, str(done)
    return done


def told(done: launcher.Completed):
    """Return rank 0's print; at the end UCX may print a warning, too, after it."""
    return json.loads(done.stdout.partition("\n")[0])


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "cyclic", "expected"),
    [
        (4, True, ["h1", "h2", "h1", "h2"]),
        (3, False, ["h1", "h1", "h2"]),
    ],
)
def test_places_memory_and_collectives(two, ranks, cyclic, expected):
    found = told(run(two.cyclic if cyclic else two.block, ranks, "placed"))
    assert found["hosts"] == expected
    assert found["nodes"] == [int(host[1]) - 1 for host in expected]
    assert found["checked"] >= 4


@pytest.mark.parametrize(
    ("cyclic", "ring"), [(False, 1.5), pytest.param(True, 3.0, marks=pytest.mark.long)], ids=["block", "cyclic"]
)
def test_hierarchical_sends_every_byte_once_and_the_ring_more(two, cyclic, ring):
    size = 4 << 20
    found = measure_hosts.measure(two, size, 1, cyclic=cyclic)
    # Headers and acknowledgements come on top.
    assert 1.0 <= found["hierarchical"]["bytes"] / size < 1.1
    assert ring <= found["ring"]["bytes"] / size < 1.1 * ring


@pytest.mark.long
def test_a_job_ends_when_a_host_is_cut_off():
    """Open MPI's mpirun waits for ever for the daemon there: rank 0 ends it."""
    settings = {"MPIDDP_TIMEOUT": "5", "MPIDDP_FLIGHT_RECORDER": "0"}
    with (
        hosts.Hosts(2) as some,
        launcher.start("waits", "alike", "loop", ranks=4, on=some.block, **settings) as job,
    ):
        job.wait_for("pid of ", 60, times=4)
        some.lose("h2", crash=False)
        cut_s = time.monotonic()
        done = job.wait(60)
    assert done.rc != 0 and time.monotonic() - cut_s < 40, done
    why = "no answer: dead, stopped, or its node is out of reach"
    assert re.search(rf"did not finish in 5 s:\n.*NOT in it:\n.* ranks 2-3 \(node h2\) +{why}", done.stderr), done


@needs_ulfm
@pytest.mark.core
@pytest.mark.parametrize(("cyclic", "victim"), [(False, 3), (True, 0)], ids=["block", "cyclic"])
def test_others_go_on_when_a_rank_of_a_host_dies(two, cyclic, victim):
    on = two.cyclic if cyclic else two.block
    done = launcher.job("moved", victim, ranks=4, on=on, options=launcher.ULFM, limit_s=90)
    assert done.rc == 0, str(done)
    expected = ["h2", "h1", "h2"] if cyclic else ["h1", "h1", "h2"]
    found = told(done)
    assert found["hosts"] == expected
    assert found["nodes"] == [list(dict.fromkeys(expected)).index(host) for host in expected]


@needs_ulfm
@pytest.mark.core
@pytest.mark.parametrize("victim", thinned([0, 3], 3))
def test_death_before_mpi_ends_the_job_with_its_reason(two, victim):
    options = {"ranks": 4, "on": two.block, "options": launcher.ULFM, "limit_s": 50}
    done = launcher.job("lethal_train", **options, VICTIMS=f"{victim} before mpiddp.cli:main 1")
    # mpirun's exit code is 0 when it has lost a daemon.
    said = f"1 of the 2 ranks on host h{1 + victim // 2} ended before MPI had started"
    assert said in done.stderr and done.seconds < 20, str(done)


@pytest.mark.long
def test_suite_across_hosts(two):
    tests = [CHECKOUT / "tests" / f"{name}.py" for name in ("parallel/test_naive", "distributed/test_p2p")]
    options = ("-q", "-p", "no:cacheprovider", "--color=no", "--rootdir", CHECKOUT)
    done = run(two.block, 4, "-m", "pytest", *options, *tests)
    assert len(re.findall(r"\d+ passed", done.stdout)) == 1, f"one rank alone speaks: {done}"
