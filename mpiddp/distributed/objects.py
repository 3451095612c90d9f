"""Collectives and messages of Python objects, by pickle.

Unpickling can run any code that the sender wants; the senders are ranks of this job only.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddp.algorithms import native
from mpiddp.algorithms.handshake import before
from mpiddp.algorithms.plan import Plan, plain
from mpiddp.faults.calls import NO_ROOT, make_call
from mpiddp.mpi.link import Link
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

from .dispatch import expect_on_root, perform, root_rank
from .groups import GroupLike, ProcessGroup, member
from .p2p import recv, send


def _pickled(obj: object) -> Array:
    return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), dtype=np.uint8)


def _gather(link: Link, data: Array, root: int = NO_ROOT) -> Steps:
    """Return the objects of all ranks, on one rank or on all of them."""
    sizes = np.empty(link.size, np.int64)
    yield link.now.Iallgather(np.array([data.size]), sizes)
    received = [np.empty(size, np.uint8) for size in sizes] if root in (NO_ROOT, link.rank) else []
    if root == NO_ROOT:
        yield from native.all_gather_list(link.after(), received, data)
    else:
        yield from native.gather(link.after(), received, data, root)
    return [pickle.loads(each.data) for each in received]


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
    """Put the objects of all ranks into the lists of all ranks.

    ``object_list`` is a list in which element r becomes rank r's ``obj``. IndexError if it is shorter than the group.
    `mpiddp.distributed` describes ``group`` and the other errors.

    Examples
    --------
    >>> x = [None, None]
    >>> dist.all_gather_object(x, {"rank": dist.get_rank()})
    >>> x
    [{'rank': 0}, {'rank': 1}]
    """
    group = member(group, "all_gather_object")
    if group is None:
        return
    _expect_room(object_list, group, "all_gather_object", "object_list")
    object_list[: group.size()] = _perform(group, _gather, "all_gather_object", _pickled(obj))


def _perform(group: ProcessGroup, steps: Callable[..., Steps], name: str, *args: Any, root: int = NO_ROOT) -> Any:
    return perform(group, plain(group._link, steps, make_call(group._link, name, root=root)), args)


def gathered(group: ProcessGroup, name: str, obj: Any) -> list[Any]:
    """Return the objects of all ranks; ``name`` is the operation's name in records and errors.

    The ranks first compare the call. If it meets another call that compares itself, all ranks raise MismatchError, and
    the group goes on. If it meets any other call, the mismatch ends the group.
    """
    plan = Plan(make_call(group._link, name, self_comparing=True), before(_gather))
    objects: list[Any] = perform(group, plan, (_pickled(obj),))
    return objects


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
    """Put the objects of all ranks into the list of one rank.

    Rank ``dst`` gives ``object_gather_list``, in which element r becomes rank r's ``obj``. The other ranks give none,
    else ValueError. IndexError if the list is shorter than the group. ``dst`` is a global rank, ``group_dst`` a rank of
    the group; 0 by default. `mpiddp.distributed` describes ``group`` and the other errors.

    Examples
    --------
    >>> x = [None, None] if dist.get_rank() == 0 else None
    >>> dist.gather_object(f"hello from {dist.get_rank()}", x)
    >>> x is None or x == ["hello from 0", "hello from 1"]
    True
    """
    group = member(group, "gather_object")
    if group is None:
        return
    root = root_rank(group, dst, group_dst, default=0)
    expect_on_root(object_gather_list, group, root, "object_gather_list", "destination")
    if object_gather_list:
        _expect_room(object_gather_list, group, "gather_object", "object_gather_list")
    received = _perform(group, _gather, "gather_object", _pickled(obj), root, root=root)
    if object_gather_list:
        object_gather_list[: group.size()] = received


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: object = None,
    group_src: int | None = None,
) -> None:
    """Copy the objects in one rank's list into the lists of all ranks.

    ValueError if ``object_list`` has another length than that of the sender. ``src`` is a global rank, ``group_src`` a
    rank of the group: one of the two. `mpiddp.distributed` describes ``group`` and the other errors.

    Examples
    --------
    >>> x = [{"lr": 0.1}, "cosine"] if dist.get_rank() == 0 else [None, None]
    >>> dist.broadcast_object_list(x, src=0)
    >>> x
    [{'lr': 0.1}, 'cosine']
    """
    group = member(group, "broadcast_object_list")
    if group is None:
        return
    root = root_rank(group, src, group_src)
    if not isinstance(object_list, list) or not object_list:
        raise ValueError("object_list must be a list of at least one object")
    data = _pickled(object_list) if group.rank() == root else None
    received = _perform(group, _broadcast, "broadcast_object_list", data, root, root=root)
    if len(received) != len(object_list):
        raise ValueError(
            f"broadcast_object_list: rank {group.ranks[root]} sent {len(received)} objects, but this rank's object_list"
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
    """Give object r of one rank's list to rank r.

    The object replaces the first element of ``scatter_object_output_list``, a list of at least one element.
    ``scatter_object_input_list`` has one object for each rank; only the list of the sender counts. ``src`` is a global
    rank, ``group_src`` a rank of the group; 0 by default. `mpiddp.distributed` describes ``group`` and the errors.

    Examples
    --------
    >>> x = [None]
    >>> dist.scatter_object_list(x, ["a", "b"] if dist.get_rank() == 0 else None)
    >>> x[0] == "ab"[dist.get_rank()]
    True
    """
    group = member(group, "scatter_object_list")
    if group is None:
        return
    root = root_rank(group, src, group_src, default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    parts = None
    if group.rank() == root:
        inputs = scatter_object_input_list or ()
        if len(inputs) != group.size():
            raise ValueError(f"scatter_object_list needs {group.size()} objects on the source rank, got {len(inputs)}")
        parts = [_pickled(obj) for obj in inputs]
    scatter_object_output_list[0] = _perform(group, _scatter, "scatter_object_list", parts, root, root=root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: GroupLike = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the objects in ``object_list`` to another rank, which calls `recv_object_list`.

    ``dst`` is a global rank, ``group_dst`` a rank of the group: one of the two. `mpiddp.distributed` describes
    ``group`` and the errors.

    Examples
    --------
    >>> x = ["weights", 3] if dist.get_rank() == 0 else [None, None]
    >>> if dist.get_rank() == 0:
    ...     dist.send_object_list(x, dst=1)
    ... else:
    ...     sender = dist.recv_object_list(x, src=0)
    >>> x
    ['weights', 3]
    """
    group = member(group, "send_object_list")
    if group is None:
        return
    data = _pickled(object_list)
    to = root_rank(group, dst, group_dst)
    send(np.array([data.size]), group=group, group_dst=to)
    send(data, group=group, group_dst=to)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: object = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive the objects that another rank sends by `send_object_list`; return the sender's global rank.

    ValueError if the sender's list is not as long as ``object_list``. ``src`` is a global rank, ``group_src`` a rank of
    the group; any rank by default. `mpiddp.distributed` describes ``group`` and the other errors.

    Examples
    --------
    >>> x = [None]
    >>> if dist.get_rank() == 0:
    ...     dist.send_object_list([{"lr": 0.1}], dst=1)
    ... else:
    ...     assert dist.recv_object_list(x) == 0 and x == [{"lr": 0.1}]
    """
    group = member(group, "recv_object_list")
    if group is None:
        return -1
    if not isinstance(object_list, list):
        raise TypeError(f"recv_object_list needs a list as `object_list`, got {type(object_list).__name__}")
    size = np.empty(1, np.int64)
    sender = recv(size, src=src, group=group, group_src=group_src)
    memory = np.empty(size[0], np.uint8)
    recv(memory, src=sender, group=group)
    received = pickle.loads(memory.data)
    if len(received) != len(object_list):
        raise ValueError(f"rank {sender} sent {len(received)} objects, object_list has {len(object_list)} elements")
    object_list[:] = received
    return sender
