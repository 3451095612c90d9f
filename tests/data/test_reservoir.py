from collections import Counter

import pytest

from mpiddp.data.reservoir import Fifo, Reservoir


def chi_squared(counts, kinds):
    expected = sum(counts.values()) / kinds
    return sum((counts[each] - expected) ** 2 / expected for each in range(kinds))


LIMIT_49 = 85.4
"""The 99.9 % quantile of chi-squared with 49 degrees of freedom."""


def filled(seed=3, slots=50):
    reservoir = Reservoir(seed)
    reservoir.add(range(slots))
    return reservoir


def test_draws_are_uniform():
    reservoir = filled()
    assert chi_squared(Counter(reservoir.draw(50_000, last=False)[0]), 50) < LIMIT_49


def test_evictions_are_uniform_among_the_drawn():
    gone = Counter()
    reservoir = filled()
    while reservoir.seen < 50:
        reservoir.draw(100, last=False)
    for _ in range(8_000):
        slot = reservoir.evict()
        gone[slot] += 1
        reservoir.add([slot])
        while reservoir.seen < 50:  # so that all were drawn again
            reservoir.draw(1, last=False)
    assert chi_squared(gone, 50) < LIMIT_49


def test_the_last_draws_are_uniform_and_each_slot_comes_once():
    firsts = Counter()
    for seed in range(2_000):
        reservoir = filled(seed, slots=50)
        reservoir.draw(30, last=False)
        taken = []
        while drawn := reservoir.draw(7, last=True)[0]:
            taken += drawn
        assert sorted(taken) == list(range(50)) and reservoir.seen == 0
        firsts[taken[0]] += 1
    assert chi_squared(firsts, 50) < LIMIT_49


def test_nothing_leaves_before_it_was_drawn():
    """A long stream through a small reservoir."""
    reservoir, drawn, fresh = Reservoir(1), set(), 0
    for step in range(5_000):
        reservoir.add([fresh])
        fresh += 1
        if len(reservoir.slots) > 20:
            while (gone := reservoir.evict()) is None:
                drawn.update(reservoir.draw(1, last=False)[0])
            assert gone in drawn
        if step % 3:
            drawn.update(reservoir.draw(2, last=False)[0])
        assert {*reservoir.slots[: reservoir.seen]} <= drawn and drawn.isdisjoint(reservoir.slots[reservoir.seen :])
        assert len(set(reservoir.slots)) == len(reservoir.slots)
    assert fresh - len(reservoir.slots) <= len(drawn)


@pytest.mark.parametrize("policy", [Fifo, Reservoir])
def test_state_goes_on_with_the_same_draws(policy):
    one, other = policy(5), policy(6)
    one.add(range(20))
    one.draw(7, last=False)
    other.load_state_dict(one.state_dict(), list(one.slots))
    found = [[each.draw(5, last=False), each.evict(), each.draw(30, last=True)] for each in (one, other)]
    assert found[0] == found[1]


def test_fifo_keeps_the_order():
    fifo = Fifo()
    fifo.add(range(5))
    assert not fifo.ready(6, min_fill=1) and fifo.ready(3, min_fill=1) and not fifo.ready(3, min_fill=6)
    assert fifo.draw(3, last=False) == ([0, 1, 2], [0, 1, 2]) and fifo.evict() is None
    assert fifo.draw(3, last=True)[0] == [3, 4] and fifo.draw(3, last=True)[0] == []
