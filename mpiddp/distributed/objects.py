"""Collectives and point to point on Python objects, by pickle.

Unpickling runs what the sender wrote: objects come from ranks of this job only.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.algorithms import native
from mpiddp.algorithms.plan import plain
from mpiddp.faults.calls import make_call
from mpiddp.mpi.link import Link
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from .dispatch import expect_on_root, perform, root_rank
from .groups import GroupLike, ProcessGroup, member
from .p2p import recv, send


def _pickled(obj: object) -> Array:
    return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), dtype=np.uint8)


def _all_gather(link: Link, data: Array) -> Steps:
    sizes = np.empty(link.size, np.int64)
    yield link.now.Iallgather(np.array([data.size]), sizes)
    received = [np.empty(size, np.uint8) for size in sizes]
    yield from native.all_gather_list(link.after(), received, data)
    return [pickle.loads(each.data) for each in received]


def _gather(link: Link, data: Array, root: int) -> Steps:
    sizes = np.empty(link.size, np.int64) if link.rank == root else None
    yield link.now.Igather(np.array([data.size]), sizes, root)
    received = None if sizes is None else [np.empty(size, np.uint8) for size in sizes]
    yield from native.gather(link.after(), received, data, root)
    return [pickle.loads(each.data) for each in received or ()]


def _broadcast(link: Link, data: Array | None, root: int) -> Steps:
    size = np.array([0 if data is None else data.size])
    yield link.now.Ibcast(size, root)
    memory = np.empty(size[0], np.uint8) if data is None else data
    yield from native.broadcast(link.after(), memory, root)
    return pickle.loads(memory.data)


def _scatter(link: Link, parts: Sequence[Array] | None, root: int) -> Steps:
    size = np.empty(1, np.int64)
    yield link.now.Iscatter(None if parts is None else np.array([part.size for part in parts]), size, root)
    memory = np.empty(size[0], np.uint8)
    yield from native.scatter(link.after(), memory, parts, root)
    return pickle.loads(memory.data)


def all_gather_object(object_list: list[Any], obj: Any, group: GroupLike = None) -> None:
    """Put every rank's ``obj`` into ``object_list``, rank r's at r; IndexError if it is shorter than the group."""
    found = member(group, "all_gather_object")
    if found is None:
        return
    _expect_room(object_list, found, "all_gather_object", "object_list")
    object_list[: found.size()] = perform(
        found, plain(found.link, _all_gather, make_call(found.link, "all_gather_object")), (_pickled(obj),)
    )


def _expect_room(objects: object, group: ProcessGroup, name: str, parameter: str) -> None:
    if not isinstance(objects, list):
        raise TypeError(f"{name} needs a list as `{parameter}`, got {type(objects).__name__}")
    if len(objects) < group.size():
        raise IndexError(f"{name} needs room for {group.size()} objects in `{parameter}`, got {len(objects)}")


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
) -> None:
    """Put every rank's ``obj`` into the list of rank ``dst``, rank r's at r.

    ``object_gather_list`` is given on ``dst`` only, else ValueError; IndexError if too short.
    """
    found = member(group, "gather_object")
    if found is None:
        return
    root = root_rank(found, dst, group_dst, default=0)
    expect_on_root(object_gather_list, found, root, "object_gather_list", "destination")
    if object_gather_list:
        _expect_room(object_gather_list, found, "gather_object", "object_gather_list")
    gathered = perform(
        found, plain(found.link, _gather, make_call(found.link, "gather_object", root=root)), (_pickled(obj), root)
    )
    if object_gather_list:
        object_gather_list[: found.size()] = gathered


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: object = None,
    group_src: int | None = None,
) -> None:
    """Copy the objects of rank ``src`` into every rank's ``object_list``.

    ValueError if its length is not that of ``src`` (torch: EOFError).
    """
    found = member(group, "broadcast_object_list")
    if found is None:
        return
    root = root_rank(found, src, group_src)
    if not isinstance(object_list, list) or not object_list:
        raise ValueError("object_list must be a list of at least one object")
    data = _pickled(object_list) if found.rank() == root else None
    received = perform(
        found, plain(found.link, _broadcast, make_call(found.link, "broadcast_object_list", root=root)), (data, root)
    )
    if len(received) != len(object_list):
        raise ValueError(
            f"broadcast_object_list: rank {found.ranks[root]} sent {len(received)} objects, but this rank's object_list"
            f" has {len(object_list)}; give lists of equal length on all ranks"
        )
    object_list[:] = received


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
) -> None:
    """Give object r of rank ``src``'s ``scatter_object_input_list`` to rank r.

    It becomes the first of ``scatter_object_output_list``.
    """
    found = member(group, "scatter_object_list")
    if found is None:
        return
    root = root_rank(found, src, group_src, default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    parts = None
    if found.rank() == root:
        inputs = scatter_object_input_list or ()
        if len(inputs) != found.size():
            raise ValueError(f"scatter_object_list needs {found.size()} objects on the source rank, got {len(inputs)}")
        parts = [_pickled(obj) for obj in inputs]
    scatter_object_output_list[0] = perform(
        found, plain(found.link, _scatter, make_call(found.link, "scatter_object_list", root=root)), (parts, root)
    )


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: GroupLike = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects, ``object_list``, to another's `recv_object_list`."""
    found = member(group, "send_object_list")
    if found is None:
        return
    data = _pickled(object_list)
    to = root_rank(found, dst, group_dst)
    send(np.array([data.size]), group=found, group_dst=to)
    send(data, group=found, group_dst=to)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: object = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive the objects of `send_object_list`; return the sender's global rank.

    ValueError if its list is not as long as ``object_list``.
    """
    found = member(group, "recv_object_list")
    if found is None:
        return -1
    if not isinstance(object_list, list):
        raise TypeError(f"recv_object_list needs a list as `object_list`, got {type(object_list).__name__}")
    size = np.empty(1, np.int64)
    sender = recv(size, src=src, group=found, group_src=group_src)
    memory = np.empty(size[0], np.uint8)
    recv(memory, src=sender, group=found)
    received = pickle.loads(memory.data)
    if len(received) != len(object_list):
        raise ValueError(f"rank {sender} sent {len(received)} objects, object_list has {len(object_list)} places")
    object_list[:] = received
    return sender
