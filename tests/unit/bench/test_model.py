"""The cost model against a simulation of the messages, and its fit."""

from __future__ import annotations

import pytest

from mpiddp.bench import model, results
from mpiddp.bench.model import Link, Sample
from mpiddp.bench.results import Point, Series
from mpiddp.cli import main
from mpiddp.training.config import UsageError

NEAR, FAR = Link(3e-6, 2e-9), Link(50e-6, 10e-9)


def simulate(n: float, p: int, per_node: int = 1024) -> float:
    """Send the messages of a ring one by one: seconds until the last rank has the sum."""
    clocks = [0.0] * p
    for _ in range(2 * (p - 1)):
        before = list(clocks)
        for source in range(p):
            target = (source + 1) % p
            link = NEAR if source // per_node == target // per_node else FAR
            arrival = max(before[source], before[target]) + link.alpha + n / p * link.beta
            clocks[target] = max(clocks[target], arrival)
            clocks[source] = max(clocks[source], arrival)
    return max(clocks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("size_bytes", [64, 1 << 20])
def test_ring_takes_the_time_of_its_messages(ranks, size_bytes):
    assert model.predict("ring", NEAR, FAR, size_bytes, ranks, ranks) == pytest.approx(simulate(size_bytes, ranks))
    two_nodes = model.predict("ring", NEAR, FAR, size_bytes, ranks, -(-ranks // 2))
    assert two_nodes == pytest.approx(simulate(size_bytes, ranks, -(-ranks // 2)), rel=0.5)
    assert two_nodes >= simulate(size_bytes, ranks, -(-ranks // 2)) * (1 - 1e-9)


def test_hierarchical_is_a_ring_between_nodes_of_one_rank():
    for size_bytes in (64, 1 << 20):
        found = model.predict("hierarchical", NEAR, FAR, size_bytes, 8, 1)
        assert found == pytest.approx(model.ring(FAR, size_bytes, 8))


def test_hierarchical_on_one_node_uses_no_network():
    broken = Link(1e9, 1e9)
    assert model.predict("hierarchical", NEAR, broken, 1000, 8, 8) == pytest.approx(6 * 3e-6 + 1.75 * 1000 * 2e-9)
    assert model.predict("ring", NEAR, broken, 1000, 8, 8) < 1


def test_bytes_on_a_nodes_link():
    """Between 4 nodes of 8 ranks, hierarchical sends 2 n (k-1)/k bytes, a ring of all ranks 2 n (p-1)/p."""
    n, byte, nothing = 1 << 20, Link(0, 1), Link(0, 0)
    assert model.predict("hierarchical", nothing, byte, n, 32, 8) == pytest.approx(2 * n * 3 / 4)
    assert model.predict("ring", nothing, byte, n, 32, 8) == pytest.approx(2 * n * 31 / 32)


def test_fit_finds_the_constants_of_its_samples():
    samples = [Sample(size, ranks, simulate(size, ranks)) for ranks in (2, 4) for size in (64, 4096, 1 << 20)]
    assert model.fit(samples) == pytest.approx(NEAR, rel=1e-6)
    unseen = [Sample(size, 8, 2 * simulate(size, 8)) for size in (8, 1 << 22)]
    assert model.relative_errors(unseen, NEAR) == pytest.approx([-0.5, -0.5])


@pytest.mark.parametrize("power", [-0.1, 2.0])
def test_fit_makes_no_constant_negative(power):
    """Times that fall with the size want a negative beta, those that grow faster than it a negative alpha."""
    samples = [Sample(size, 2, 1e-9 * size**power) for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22)]
    link = model.fit(samples)
    assert min(link) >= 0 and max(link) > 0
    assert sum(error**2 for error in model.relative_errors(samples, link)) <= len(samples), "zeros fit better"


def test_too_few_samples():
    with pytest.raises(ValueError, match="got 1"):
        model.fit([Sample(8, 2, 1.0)])


@pytest.mark.parametrize(("each_s", "count", "compute_s"), [(1.0, 1, 5.0), (1.0, 4, 8.0), (3.0, 4, 8.0), (2.0, 3, 0.0)])
def test_exposed_is_the_rest_of_a_queue(each_s, count, compute_s):
    free = 0.0
    for index in range(count):
        full = compute_s * (index + 1) / count
        free = max(free, full) + each_s
    assert model.exposed(each_s, count, compute_s) == pytest.approx(free - compute_s)


def measured(path, nodes=(4,), algorithm="ring"):
    points = [
        Point(size, size // 4, seconds := simulate(size, 4), seconds, seconds, 9, algorithm, 0)
        for size in (64, 512, 4096, 1 << 15, 1 << 18, 1 << 21)
    ]
    environment = {"ranks": 4, "nodes": list(nodes), "host": "h", "processor": "x", "cores": 4, "mpi": "M"}
    environment |= {"mpi4py": "4", "numpy": "2"}
    results.write(path, "sweep", environment, [Series("a", "all_reduce", "float32", "sum", 4, 1.5, points)])
    return path


def test_command_predicts_from_a_file_without_mpi(tmp_path, capsys):
    file, out = measured(tmp_path / "a.json"), tmp_path / "out.json"
    given = ["bench", "model", "--from", str(file), "--ranks", "2:64", "--per-node", "4", "--bytes", "1M"]
    assert main([*given, "--json", str(out)]) == 0
    rows = results.read(out)[0]["rows"]
    assert [row["ranks"] for row in rows] == [2, 4, 8, 16, 32, 64]
    assert rows[1]["seconds"]["ring"] == pytest.approx(simulate(1 << 20, 4), rel=1e-3)
    assert "from 3 measured times; error on 3 others: median 0%, largest 0%" in capsys.readouterr().out


def test_buckets_pay_behind_a_computation(tmp_path, capsys):
    file, out = measured(tmp_path / "a.json"), tmp_path / "out.json"
    found = []
    for compute in ("1", "1e-12"):
        given = ["bench", "model", "--from", str(file), "--ranks", "4", "--bytes", "128M", "--compute", compute]
        assert main([*given, "--json", str(out)]) == 0
        found += results.read(out)[0]["rows"]
    hidden, bare = found
    assert hidden["bucket_bytes"] < 1 << 20 and hidden["exposed_s"] < hidden["seconds"]["ring"] / 100
    assert bare["bucket_bytes"] == 1 << 27 and bare["exposed_s"] == pytest.approx(min(bare["seconds"].values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"nodes": (2, 2)}, "one on each"), ({"algorithm": "native"}, "no all_reduce by ring")],
)
def test_files_that_do_not_serve(tmp_path, change, said):
    with pytest.raises(UsageError, match=said):
        model._read([measured(tmp_path / "a.json", **change)])
