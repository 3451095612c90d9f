"""Circles of waits: found whichever ranks know them, and none where a rank may go on."""

import random

from mpiddp.faults.deadlock import Wait, circle_of_each, circles, text


def messages(*pairs: tuple[int, int]) -> dict[int, Wait]:
    return {rank: Wait({peer}, one_suffices=True) for rank, peer in pairs}


def test_a_chain_to_a_rank_that_computes_is_none() -> None:
    assert circles(messages((0, 1), (1, 2), (2, 3))) == []
    long = messages(*((rank, rank + 1) for rank in range(3000)), *((rank, rank - 1) for rank in range(6000, 3001, -1)))
    assert circles(long) == []


def test_a_collective_waits_for_all_and_any_source_for_one() -> None:
    waits = messages((0, 2), (2, 0))
    assert circles(waits | {3: Wait({0, 9})}) == [[0, 2]], "rank 9 computes, and rank 0 never comes"
    assert circle_of_each(waits | {3: Wait({0, 9})})[3] == [0, 2]
    assert 3 not in circle_of_each(waits | {3: Wait({0, 9}, one_suffices=True)})
    assert circles({0: Wait({1, 2}, one_suffices=True), 1: Wait({0}), 2: Wait({0})}) == [[0, 1]]
    assert circles({0: Wait(set()), 1: Wait({0})}) == [], "all are in it: the network may be down"


def test_every_rank_that_cannot_go_on_leads_to_a_circle() -> None:
    """Beside removing one rank after the other that may go on."""
    for seed in range(300):
        dice = random.Random(seed)
        size = dice.randint(2, 9)
        chosen = [rank for rank in range(size) if dice.random() < 0.9]
        waits = {
            rank: Wait(set(dice.sample(range(size), dice.randint(1, min(3, size)))), dice.random() < 0.5)
            for rank in chosen
        }
        stuck = set(waits)
        while free := [rank for rank in stuck if waits[rank].can_end(dict.fromkeys(stuck, waits[rank]))]:
            stuck.remove(free[0])
        found = circles(waits)
        for circle in found:
            assert all(after in waits[rank].ranks for rank, after in zip(circle, circle[1:] + circle[:1], strict=True))
        reached = circle_of_each(waits)
        assert reached.keys() == stuck and all(each in found for each in reached.values()), (seed, waits)


def test_text() -> None:
    assert text([0, 2, 1]) == "rank 0 waits for rank 2, which waits for rank 1, which waits for rank 0: a deadlock"
    assert text([3]) == "rank 3 waits for itself: a deadlock"
    assert "rank 7, which waits for 92 more ranks, which waits for rank 0: " in text(list(range(100)))
