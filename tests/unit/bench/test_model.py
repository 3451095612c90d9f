"""The cost model against a simulation of the algorithms, message by message, and its fit."""

from __future__ import annotations

import re

import pytest

from mpiddp.bench import model, predict, results
from mpiddp.bench.model import Constants, Machine, Sample
from mpiddp.bench.results import Point, Series
from mpiddp.cli import main
from mpiddp.training.config import UsageError

ALPHA, BETA, GAMMA = 3e-6, 2e-9, 0.5e-9
TRUE = Constants(ALPHA, BETA, GAMMA)


class Ranks:
    """Clocks of ranks that send to each other: what a formula has to come out as, without one."""

    def __init__(self, count: int) -> None:
        self.clocks = [0.0] * count

    def exchange(self, pairs: list[tuple[int, int]], size_bytes: float, reduced: bool) -> None:
        """Let messages pass at once, each from the first rank of a pair to the second, which may reduce it."""
        before = list(self.clocks)
        for source, target in pairs:
            arrival = max(before[source], before[target]) + ALPHA + size_bytes * BETA
            self.clocks[target] = max(self.clocks[target], arrival + GAMMA * size_bytes * reduced)
            self.clocks[source] = max(self.clocks[source], arrival)


def simulate(algorithm: str, n: float, p: int) -> float:
    ranks = Ranks(p)
    around = [(rank, (rank + 1) % p) for rank in range(p)]
    distances = [1 << bit for bit in range((p - 1).bit_length())]
    match algorithm:
        case "ring":
            for step in range(2 * (p - 1)):
                ranks.exchange(around, n / p, reduced=step < p - 1)
        case "tree":
            for distance in distances:
                ranks.exchange([(rank, rank ^ distance) for rank in range(p)], n, reduced=True)
    return max(ranks.clocks)


@pytest.mark.parametrize("algorithm", [name for name in model.ALGORITHMS if name != "hierarchical"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("size_bytes", [64, 1 << 20])
def test_formula_is_what_the_messages_take(algorithm, ranks, size_bytes):
    machine = Machine(TRUE, Constants(1.0, 1.0, 1.0))
    found = machine.time(model.cost(algorithm, size_bytes, ranks, per_node=ranks), size_bytes)
    assert found == pytest.approx(simulate(algorithm, size_bytes, ranks), rel=1e-9)


@pytest.mark.parametrize("algorithm", model.ALGORITHMS)
def test_one_node_uses_no_network_and_one_rank_a_node_nothing_else(algorithm):
    near = model.cost(algorithm, 1000, 4, per_node=8)
    assert near.far_messages == near.far_bytes == 0
    far = model.cost(algorithm, 1000, 4, per_node=1)
    assert far.near_messages == far.near_bytes == 0
    if algorithm not in ("hierarchical", "ring"):
        assert (far.far_messages, far.far_bytes) == (near.near_messages, near.near_bytes)
    assert far.reduced_bytes == near.reduced_bytes


def test_bytes_on_a_nodes_link():
    n, nodes, per_node = 1 << 20, 4, 8
    ranks = nodes * per_node
    sent = {name: model.cost(name, n, ranks, per_node).far_bytes for name in model.ALGORITHMS}
    assert sent["hierarchical"] == pytest.approx(2 * n * (nodes - 1) / nodes)
    assert sent["ring"] == pytest.approx(2 * n * (ranks - 1) / ranks)
    assert sent["tree"] == per_node * n * 2


def test_fit_finds_the_constants_it_was_made_from():
    samples = [
        Sample(name, size, 4, simulate(name, size, 4)) for name in ("ring", "tree") for size in (64, 4096, 1 << 20)
    ]
    assert model.fit(samples)[:3] == pytest.approx((ALPHA, BETA, GAMMA), rel=1e-6)
    unseen = [Sample("ring", size, 8, 2 * simulate("ring", size, 8)) for size in (8, 1 << 22)]
    assert model.relative_errors(unseen, TRUE) == pytest.approx([-0.5, -0.5])


def test_fit_finds_the_cache():
    def beyond(size: int) -> float:
        return 6e-9 * max(size - (1 << 18), 0)

    samples = [
        Sample(name, size, 4, simulate(name, size, 4) + sent * beyond(size))
        for name, sent in (("ring", 1.5), ("tree", 2.0))
        for size in (1 << power for power in range(8, 25, 2))
    ]
    assert model.fit(samples) == pytest.approx((ALPHA, BETA, GAMMA, 6e-9, 1 << 18), rel=1e-3)


def test_fit_makes_no_constant_negative():
    # Times that fall with the size would need a negative beta.
    samples = [Sample("ring", size, 2, 1e-3 / size**0.1) for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22)]
    constants = model.fit(samples)
    assert min(constants) >= 0
    assert constants.alpha > 0


def test_too_few_samples():
    with pytest.raises(ValueError, match="got 2"):
        model.fit([Sample("ring", 8, 2, 1.0)] * 2)


def test_unknown_algorithm():
    with pytest.raises(ValueError, match="no formula for 'two_shot'"):
        model.cost("two_shot", 8, 2, 2)


@pytest.mark.parametrize(("each_s", "count", "compute_s"), [(1.0, 1, 5.0), (1.0, 4, 8.0), (3.0, 4, 8.0), (2.0, 3, 0.0)])
def test_exposed_is_what_a_queue_leaves(each_s, count, compute_s):
    free = 0.0
    for index in range(count):
        full = compute_s * (index + 1) / count
        free = max(free, full) + each_s
    assert model.exposed(each_s, count, compute_s) == pytest.approx(free - compute_s)


def test_buckets_pay_when_there_is_something_to_hide_behind():
    machine = Machine(Constants(1e-5, 1e-9, 0), Constants(1e-5, 1e-9, 0))
    whole = machine.time(model.cost("ring", 1 << 27, 8, 8), 1 << 27)
    size, _, left = model.best_bucket(machine, 1 << 27, 8, 8, compute_s=whole)
    assert 1 << 17 < size < 1 << 26
    assert left < whole / 4
    assert model.best_bucket(machine, 1 << 27, 8, 8, compute_s=0.0)[0] == 1 << 27


def measured(path, nodes=(4,), algorithm="ring"):
    points = [
        Point(size, size // 4, seconds := simulate("ring", size, 4), seconds, seconds, 9, algorithm, 0)
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
    assert rows[1]["seconds"]["ring"] == pytest.approx(simulate("ring", 1 << 20, 4), rel=1e-3)
    text = capsys.readouterr().out
    assert "error on 3 times of ring that the fit has not seen: median 0%, largest 0%" in text
    assert "Thakur" in text
    assert not re.search(r"``|\]_|====|----|\.\. \[", text), "marks of a markup language are not for a terminal"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"nodes": (2, 2)}, "one on each"), ({"algorithm": "native"}, "no all_reduce by ring")],
)
def test_files_that_do_not_serve(tmp_path, change, said):
    with pytest.raises(UsageError, match=said):
        predict._read([measured(tmp_path / "a.json", **change)])
