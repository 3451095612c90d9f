"""The comparison of calls between nodes, with made-up groups: findings, their times and texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpiddp.errors import MismatchError
from mpiddp.faults import calls
from mpiddp.faults.between_nodes import BetweenNodes, Comparison
from mpiddp.faults.calls import Calls, Record, make_call

LINK: Any = SimpleNamespace(members=None)
SUM, INT = (make_call(LINK, "all_reduce", dtype=np.dtype(kind), count=4).record for kind in ("f4", "i4"))


class Node:
    """The only rank of a node, in a group of one rank a node."""

    def __init__(self, nodes: list[Node], rank: int, size: int) -> None:
        self.nodes, self.rank = nodes, rank
        self.handlers: dict[int, Any] = {}
        self.told: list[str] = []
        self.sent = 0
        self.between_nodes = BetweenNodes(self)  # type: ignore[arg-type]
        ranks = tuple(range(size))
        link: Any = SimpleNamespace(
            id=9,
            ranks=ranks,
            rank=rank,
            history=0,
            one_node=False,
            by_node=np.arange(size),
            node_starts=np.arange(size),
        )
        link.node = SimpleNamespace(ranks=(rank,), rank=0)
        self.calls = Calls(link, bytearray(calls.REGION_BYTES))
        comparison = Comparison(link, self.calls, self.report)
        link.find = {Comparison: comparison}.get
        self.links = lambda: [link]

    def report(self, error: MismatchError) -> None:
        """Tell all ranks, as a monitor does."""
        for each in self.nodes:
            each.told.append(str(error))

    def send(self, to: int, tag: int, message: object) -> None:
        self.sent += 1
        self.nodes[to].handlers[tag](self.rank, message)

    def call(self, *made: Record) -> None:
        for each in made:
            self.calls.publish(self.calls.latest + 1, each)


def group(size: int) -> list[Node]:
    nodes: list[Node] = []
    nodes += [Node(nodes, rank, size) for rank in range(size)]
    return nodes


def look(nodes: list[Node], times: int = 2) -> None:
    for _ in range(times):
        for each in nodes:
            each.between_nodes.look()


def test_equal_calls_are_no_mismatch_and_cost_one_message_a_look() -> None:
    nodes = group(3)
    for _ in range(5000):
        for each in nodes:
            each.call(SUM)
    look(nodes, 5)
    assert [each.told for each in nodes] == [[]] * 3
    assert [each.sent for each in nodes] == [1] * 3, "nothing new was to be sent after the first look"


def test_a_rank_that_comes_later_is_compared_with_what_arrived_before() -> None:
    nodes = group(3)
    for each in nodes[:2]:
        each.call(SUM, SUM)
    look(nodes)
    nodes[2].call(SUM)
    look(nodes)
    assert [each.told for each in nodes] == [[]] * 3
    nodes[2].call(INT)
    nodes[2].between_nodes.look()
    text = "calls all_reduce #2 of 4 float32 elements, rank 2 calls all_reduce #2 of 4 int32 elements"
    assert all(len(each.told) == 1 and text in each.told[0] for each in nodes), nodes[0].told
    look(nodes, 3)
    assert all(len(each.told) <= 3 for each in nodes), "once from each side at most"


def test_an_operation_that_compares_itself_is_left_to_do_it() -> None:
    nodes = group(2)
    nodes[0].call(SUM.marked())
    nodes[1].call(INT.marked())
    look(nodes)
    assert not nodes[0].told and not nodes[1].told
    nodes[0].call(SUM.marked())
    nodes[1].call(INT)
    look(nodes)
    assert nodes[0].told and nodes[1].told, "one of them waits for records that the other does not send"


def test_records_that_are_unmapped_meanwhile_are_no_mismatch_and_no_error() -> None:
    nodes = group(2)
    nodes[0].call(SUM)
    nodes[1].call(SUM)
    look(nodes)
    nodes[0].call(SUM)
    nodes[0].calls.close()
    nodes[1].call(INT)
    look(nodes)
    assert not nodes[0].told and not nodes[1].told
