"""Several hosts (see hosts): names, addresses, wires and memory that ends, which pretended nodes lack."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import launcher
from harness.tiers import thinned

from launch import hosts, measure_hosts

CHECKOUT = Path(__file__).parents[2]
# Prints a line of JSON for rank 0, after asserting the facts of any placement.
RANKS = """
import json, os, socket, sys
import numpy as np
import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.faults import this_job
from mpiddp.shm import segment

dist.init_process_group()
world = this_job.current().world
rank, size = dist.get_rank(), dist.get_world_size()
node = world.local_ranks
assert world.hosts[rank] == socket.gethostname()
assert dist.get_node_local_rank() == node.index(rank)
assert all(world.hosts[each] == socket.gethostname() for each in node)

# Memory is shared within a host, and ends there.
x = dist.symmetric_empty(8)
x[...] = rank
dist.barrier()
if len(node) > 1:
    place = segment.find(x)
    shared = segment.segment(place.segment)
    for each in range(size):
        try:
            seen = shared.view(each, place.offset, x.size, x.dtype)
        except KeyError:
            assert each not in node, (each, node)
        else:
            assert each in node and (seen == each).all(), (each, node, seen)
dist.barrier()

# Every algorithm is right over the wire, at sizes of one message, many, and an odd one.
rng = np.random.default_rng(0)
checked = 0
for name in ("auto", *plan.offering("all_reduce")):
    if name in ("one_shot", "two_shot"):
        continue
    if name != "auto":
        os.environ["MPIDDP_ALGORITHM"] = "all_reduce:" + name
    plan.forget()
    for count in (1, 1000, 100_003):
        rows = rng.uniform(-1, 1, (size, count))
        for make in (np.empty, dist.symmetric_empty):
            x = make(count, np.float32)
            x[...] = rows[rank]
            dist.all_reduce(x)
            np.testing.assert_allclose(x, rows.sum(0), rtol=1e-5, atol=1e-5, err_msg=name)
            everybody = [np.empty_like(x) for _ in range(size)]
            dist.all_gather(everybody, x)
            assert all((each == x).all() for each in everybody), (name, count, "ranks have different bits")
            checked += 1
os.environ.pop("MPIDDP_ALGORITHM", None)
plan.forget()
x = np.full(70_000, rank, np.float64)
dist.broadcast(x, src=size - 1)
assert (x == size - 1).all()
told = [None] * size
dist.all_gather_object(told, {"rank": rank})
assert told == [{"rank": each} for each in range(size)]
if rank == 0:
    print(json.dumps({"hosts": world.hosts, "nodes": world.nodes, "checked": checked}), flush=True)
dist.destroy_process_group()
"""

# Each host has memory and folders of its own, and shares /tmp.
DATA = """
import json, socket, sys
from pathlib import Path
import numpy as np
import mpiddp as dist
from mpiddp.data import ArrayDataset, DataLoader, DistributedSampler, shared_on_node

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
calls = []

def load():
    calls.append(socket.gethostname())
    return [np.arange(60_000.0).reshape(3000, 20), np.arange(3000), np.load(sys.argv[1], mmap_mode="r")]

samples, labels, mapped = shared_on_node(load)
start = samples.__array_interface__["data"][0]
for line in Path("/proc/self/maps").read_text().splitlines():
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    if first <= start < last:
        file = line.split()[4]
data = ArrayDataset(samples, labels, mapped)
loader = DataLoader(data, 100, sampler=DistributedSampler(data, mode="exact"))
seen = []
for x, y, z in loader:
    assert (x[:, 0] == 20 * y).all() and (z == -y).all()
    seen += y.tolist()
told = [None] * size
dist.all_gather_object(told, (socket.gethostname(), calls, file, seen))
if rank == 0:
    assert sorted(sum((seen for *_, seen in told), [])) == list(range(3000))
    print(json.dumps([each[:3] for each in told]), flush=True)

def fails_on_the_last_host():
    if socket.gethostname() == told[-1][0]:
        raise FileNotFoundError("no corpus on " + socket.gethostname())
    return [np.ones(3)]

try:
    shared_on_node(fails_on_the_last_host)
except FileNotFoundError as error:
    assert str(error) == "no corpus on h2" and ", host h2" in error.__notes__[0], error.__notes__
else:
    raise SystemExit("a fault of another host went unseen")
dist.destroy_process_group()
"""

fault = hosts.why_not()
pytestmark = pytest.mark.skipif(fault is not None, reason=f"no hosts to test with: {fault}")


@pytest.fixture(scope="module")
def two() -> Iterator[hosts.Hosts]:
    with hosts.Hosts(2) as made:
        yield made


def run(some: hosts.Hosts, ranks: int, *command: str | Path, cyclic: bool = False):
    with some.start(ranks, [sys.executable, *command], cyclic=cyclic) as program:
        done = program.wait(90)
    assert done.rc == 0, str(done)
    return done


def told(done: launcher.Completed):
    """Return rank 0's print; at the end UCX may print a warning, too, after it."""
    return json.loads(done.stdout.partition("\n")[0])


@pytest.mark.parametrize(
    ("ranks", "cyclic", "expected"),
    [
        pytest.param(4, False, ["h1", "h1", "h2", "h2"], marks=pytest.mark.long),
        (4, True, ["h1", "h2", "h1", "h2"]),
        (3, False, ["h1", "h1", "h2"]),
    ],
)
def test_places_memory_and_collectives(two, tmp_path, ranks, cyclic, expected):
    (tmp_path / "ranks.py").write_text(RANKS)
    found = told(run(two, ranks, tmp_path / "ranks.py", cyclic=cyclic))
    assert found["hosts"] == expected
    assert found["nodes"] == [int(host[1]) - 1 for host in expected]
    assert found["checked"] >= 24


@pytest.mark.parametrize("cyclic", thinned([False, True], True), ids=["block", "cyclic"])
def test_one_copy_of_a_data_set_serves_the_ranks_of_its_host(two, tmp_path, cyclic):
    (tmp_path / "data.py").write_text(DATA)
    np.save(tmp_path / "z.npy", -np.arange(3000))
    found = told(run(two, 4, tmp_path / "data.py", tmp_path / "z.npy", cyclic=cyclic))
    assert [host for host, *_ in found] == (["h1", "h2", "h1", "h2"] if cyclic else ["h1", "h1", "h2", "h2"])
    files = {host: {file for where, _, file in found if where == host} for host in ("h1", "h2")}
    assert all(len(each) == 1 and each != {"0"} for each in files.values()), "the ranks of a host map one file"
    assert files["h1"] != files["h2"]
    assert sorted(call for _, calls, _ in found for call in calls) == ["h1", "h2"], "loaded once a host"


@pytest.mark.long
def test_four_hosts(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    with hosts.Hosts(4) as four:
        found = told(run(four, 4, tmp_path / "ranks.py"))
    assert found["hosts"] == ["h1", "h2", "h3", "h4"]


@pytest.mark.parametrize(
    ("cyclic", "ring"), [(False, 1.5), pytest.param(True, 3.0, marks=pytest.mark.long)], ids=["block", "cyclic"]
)
def test_hierarchical_sends_every_byte_once_and_the_ring_more(two, cyclic, ring):
    size = 4 << 20
    found = measure_hosts.measure(two, "all_reduce", str(size), "1", cyclic=cyclic)
    # Headers and acknowledgements come on top.
    assert 1.0 <= found["hierarchical"]["bytes"] / size < 1.1
    assert ring <= found["ring"]["bytes"] / size < 1.1 * ring


DISAGREEING = """
import time
import numpy as np
import mpiddp as dist

dist.init_process_group()
x = np.ones(4, np.float32)
dist.all_reduce(x.view(np.int32) if dist.get_rank() == 3 else x)  # equal bytes: MPI says nothing
while True:
    time.sleep(0.05)
    dist.all_reduce(x)
"""


def test_calls_that_differ_are_found_over_the_wire(two, tmp_path):
    (tmp_path / "program.py").write_text(DISAGREEING)
    with two.start(4, [sys.executable, tmp_path / "program.py"]) as job:
        done = job.wait(60)
    # Open MPI's ranks end their job when a connection to another host is closed, with 14, which may come first.
    assert done.rc == 111 or ("Open MPI" in hosts.mpi_library() and done.rc == 14), done
    assert re.search(
        r"rank [02] calls all_reduce #1 of 4 float32 .*, rank [23] calls all_reduce #1 of 4", done.stderr
    ), done


CUT = """
import time
import numpy as np
import mpiddp as dist

dist.init_process_group()
x = np.ones(4)
while True:
    dist.all_reduce(x)
    print("working", flush=True)
    time.sleep(0.2)
"""


@pytest.mark.long
def test_a_job_ends_when_a_host_is_cut_off(tmp_path):
    """Open MPI's mpirun waits for ever for the daemon there: rank 0 ends it."""
    (tmp_path / "program.py").write_text(CUT)
    settings = {"MPIDDP_TIMEOUT": "5", "MPIDDP_FLIGHT_RECORDER": "0"}
    with hosts.Hosts(2) as some, some.start(4, [sys.executable, tmp_path / "program.py"], env=settings) as job:
        job.wait_for("working", 60)
        some.lose("h2", crash=False)
        cut_s = time.monotonic()
        done = job.wait(60)
    assert done.rc != 0 and time.monotonic() - cut_s < 40, done
    why = "no answer: dead, stopped, or its node is out of reach"
    assert re.search(rf"did not finish in 5 s:\n.*NOT in it:\n.* rank 2 \(node .*  {why}", done.stderr), done


# Every rank writes its view of the world, before and after one has been killed.
SURVIVORS = """
import json, os, signal, sys
import numpy as np
import mpiddp as dist
from mpiddp.faults import this_job

dist.init_process_group()
me, victim = dist.get_rank(), int(sys.argv[1])
for step in range(60):
    try:
        if step == 30 and me == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for n in (7, 100_003):
            x = np.full(n, 1.0 + dist.get_rank())
            dist.all_reduce(x)
            assert (x == dist.get_world_size() * (dist.get_world_size() + 1) / 2).all(), (step, x)
    except dist.RankFailedError as error:
        assert error.ranks == [victim], error.ranks
        dist.shrink_group(error.ranks)
world = this_job.current().world
if dist.get_rank() == 0:
    print(json.dumps({"hosts": world.hosts, "nodes": world.nodes}), flush=True)
"""


@pytest.mark.parametrize(("cyclic", "victim"), [(False, 3), (True, 0)], ids=["block", "cyclic"])
def test_others_go_on_when_a_rank_of_a_host_dies(two, tmp_path, cyclic, victim):
    if "Open MPI" not in hosts.mpi_library():
        pytest.skip("only Open MPI's mpirun lets ranks live on")
    (tmp_path / "ranks.py").write_text(SURVIVORS)
    command = [sys.executable, tmp_path / "ranks.py", str(victim)]
    with two.start(4, command, cyclic=cyclic, options=["--with-ft", "ulfm"]) as program:
        done = program.wait(90)
    assert done.rc == 0, str(done)
    expected = ["h2", "h1", "h2"] if cyclic else ["h1", "h1", "h2"]
    found = told(done)
    assert found["hosts"] == expected
    assert found["nodes"] == [list(dict.fromkeys(expected)).index(host) for host in expected]


DEAD_BEFORE_MPI = """
import os, signal, sys

if os.environ["OMPI_COMM_WORLD_RANK"] == sys.argv[1]:
    os.kill(os.getpid(), signal.SIGKILL)
import mpiddp as dist
dist.init_process_group(timeout=60)
"""


@pytest.mark.parametrize("victim", thinned([0, 3], 3))
def test_death_before_mpi_ends_the_job_with_its_reason(two, tmp_path, victim):
    if "Open MPI" not in hosts.mpi_library():
        pytest.skip("only Open MPI's mpirun lets ranks live on")
    (tmp_path / "ranks.py").write_text(DEAD_BEFORE_MPI)
    with two.start(4, [sys.executable, tmp_path / "ranks.py", str(victim)], options=["--with-ft", "ulfm"]) as program:
        done = program.wait(50)
    # mpirun's exit code is 0 when it has lost a daemon.
    said = f"1 of the 2 ranks on host h{1 + victim // 2} ended before MPI had started"
    assert said in done.stderr and done.seconds < 20, str(done)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_what_started_them(number):
    command = [sys.executable, "-m", "launch.measure_hosts", "all_reduce", "--rounds", "100000"]
    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        env = {"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}", "TMPDIR": folder}
        with launcher.Program(command, env) as program:
            wait_until(lambda: ranks_of(program) == 4, "four ranks run")
            (made,) = Path(folder).glob("mpiddp-hosts-*")
            try:
                program.signal(number)
                wait_until(lambda: not program.members(), "no process is left")
            finally:
                # A killed process leaves its hosts.
                listed = [line.split()[0] for line in hosts.call("ip netns list").splitlines()]
                left = [space for space in listed if space.startswith(made.name)]
                for space in left:
                    hosts.call(f"ip netns delete {space}")
    assert len(left) == (0 if number == signal.SIGTERM else 3)


def ranks_of(program: launcher.Program) -> int:
    found = 0
    for pid in program.members():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += words[0] == sys.executable.encode() and words[1].endswith(b"wire.py")
    return found


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


@pytest.mark.long
def test_overlap_is_measured_with_a_rank_on_each_host(two):
    options = ("--bytes", "256K", "--buckets", "2", "--layers", "4", "--rounds", "1", "--compute", "0.01")
    printed = measure_hosts.run(two, 1, "-m", "mpiddp", "bench", "overlap", *options)
    assert "2 ranks on 2 nodes" in printed
    assert re.findall(r"^ +(\d+) ", printed, re.MULTILINE) == ["1", "2"]  # UCX may print a warning, too
    assert "# Wrong values: 0 OK" in printed


def test_main_job(two, tmp_path):
    options = ("--epochs", "2", "--batch-size", "100", "--output", str(tmp_path))
    done = run(two, 4, "-m", "mpiddp", "train", *options)
    assert "training on 4 ranks on 2 nodes:" in done.stdout, done
    assert (tmp_path / "model.safetensors").exists()


def test_suite_across_hosts(two):
    tests = [CHECKOUT / "tests" / f"{name}.py" for name in ("parallel/test_naive", "distributed/test_p2p")]
    done = run(two, 4, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "--rootdir", CHECKOUT, *tests)
    assert len(re.findall(r"\d+ passed", done.stdout)) == 1, f"one rank alone speaks: {done}"
