"""Collectives of one rank: kernels on the program's own stream, without a wait of the host."""

from __future__ import annotations

from collections.abc import Sequence

from mpiddp.device.place import at, moved, place_of
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.reduction import ReduceOp, premultiply
from mpiddp.mpi.requests import READY, Steps
from mpiddp.typing import Array


def broadcast(link: Link, x: Array, root: int) -> Steps:
    yield READY


def all_reduce(link: Link, x: Array, op: ReduceOp) -> Steps:
    with at(place_of(x)):
        premultiply(op, x)
    yield READY


def reduce(link: Link, x: Array, root: int, op: ReduceOp) -> Steps:
    return all_reduce(link, x, op)


def reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp) -> Steps:
    _copy(output, x)
    return all_reduce(link, output, op)


def _copy(output: Array, x: Array) -> None:
    place = place_of(output)
    with at(place):
        as_bytes(output)[...] = as_bytes(moved(x, place))


def all_gather(link: Link, output: Array, x: Array) -> Steps:
    return all_to_all(link, [output], [x])


def all_gather_list(link: Link, outputs: Sequence[Array], x: Array) -> Steps:
    return all_to_all(link, outputs, [x])


def gather(link: Link, outputs: Sequence[Array] | None, x: Array, root: int) -> Steps:
    return all_to_all(link, outputs or (), [x])


def scatter(link: Link, x: Array, inputs: Sequence[Array] | None, root: int) -> Steps:
    return all_to_all(link, [x], inputs or ())


def all_to_all(link: Link, outputs: Sequence[Array], inputs: Sequence[Array]) -> Steps:
    for output, x in zip(outputs, inputs, strict=True):
        _copy(output, x)
    yield READY


def all_to_all_single(
    link: Link, output: Array, x: Array, output_counts: Sequence[int], input_counts: Sequence[int]
) -> Steps:
    return all_to_all(link, [output], [x])
