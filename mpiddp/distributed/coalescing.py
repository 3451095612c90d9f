"""All-reduces of the arrays in a list, or in a tree such as a JAX program's gradients, by one buffer for each dtype."""

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from mpiddp import nested
from mpiddp.algorithms import plan as planning
from mpiddp.device import array_namespace, is_device_array
from mpiddp.device.packing import packed, unpack, views
from mpiddp.faults.calls import make_call
from mpiddp.mpi.future import Future
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_array, dtype_layout
from mpiddp.mpi.reduction import ReduceOp, check
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array, ArrayLike

from .dispatch import dispatch
from .groups import GroupLike, member


def _alike(xs: Sequence[Array]) -> list[list[int]]:
    """Return, for each dtype and array library, the indices of the arrays that have both."""
    indices: dict[Hashable, list[int]] = {}
    for index, x in enumerate(xs):
        indices.setdefault((array_namespace(x), x.dtype), []).append(index)
    return list(indices.values())


def _all_reduce(link: Link, xs: Sequence[Array], op: ReduceOp) -> Steps:
    for indices in _alike(xs):
        part = [xs[index] for index in indices]
        flat = packed(part)
        yield from planning.nested_all_reduce(link, flat, op)
        unpack(flat, part)
        link = link.after()


def all_reduce_coalesced(
    tensors: Sequence[ArrayLike], op: ReduceOp = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Future | None:
    """Reduce a list of arrays in place, by one all-reduce for each dtype.

    With ``async_op`` it returns a `Future` of the list, not a `Work`. ``tensors`` have the same sizes and dtypes on all
    ranks. `mpiddp.distributed` describes ``op``, ``group`` and the errors.

    Examples
    --------
    >>> x, y = np.ones(2), np.ones(1, np.int64)
    >>> dist.all_reduce_coalesced([x, y])
    >>> x.tolist(), y.tolist()
    ([2.0, 2.0], [2])
    """
    name = "all_reduce_coalesced"
    group = member(group, name)
    if group is None:
        return None
    if not isinstance(tensors, list) or not tensors:
        raise TypeError(f"{name} needs a non-empty list of arrays as `tensors`, got {tensors!r:.60}")
    xs = [as_array(x, name, name=f"tensors[{index}]") for index, x in enumerate(tensors)]
    for x in xs:
        check(x.dtype, op)
    layout = ",".join(f"{dtype_layout(x.dtype) or x.dtype.char}{x.size}" for x in xs) if len(xs) > 1 else ""
    call = make_call(group._link, name, xs, xs, op=op, count=sum(x.size for x in xs), layout=layout)
    work = dispatch(group, planning.plain(group._link, _all_reduce, call), (xs, op), xs, async_op)
    return None if work is None else work.get_future()


def _node(tree: Any) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return a container's children, and a function that makes such a container of new children; None for a leaf."""
    node = nested.children(tree)
    if node is not None:
        return node
    if isinstance(tree, int | float | complex | np.generic | np.ndarray) or is_device_array(tree):
        return None
    jax = sys.modules.get("jax")
    if jax is None or isinstance(tree, jax.Array):
        return None
    children, definition = jax.tree_util.tree_flatten(tree, is_leaf=lambda part: part is not tree)
    return None if len(children) == 1 and children[0] is tree else (children, definition.unflatten)


def contiguous(x: Any, operation: str, name: str = "tensor") -> Array:
    """Return ``x`` as a C-contiguous array, which the caller only reads; a copy if necessary."""
    if isinstance(x, np.generic):  # NumPy's arithmetic returns such scalars for arrays without dimensions
        x = np.asarray(x)
    if (isinstance(x, np.ndarray) or is_device_array(x)) and not x.flags.c_contiguous:
        x = x.copy(order="C")
    return as_array(x, operation, writable=False, name=name)


def _like(leaf: Any, result: Array) -> Any:
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(leaf, jax.Array):
        return jax.numpy.from_dlpack(result) if is_device_array(result) else jax.numpy.array(result)
    if isinstance(leaf, np.generic):
        return result[()]
    return result.item() if isinstance(leaf, int | float | complex) else result


def tree_all_reduce(tree: Any, op: ReduceOp = ReduceOp.SUM, group: GroupLike = None) -> Any:
    """Reduce the arrays of a tree over all ranks into a tree of new arrays. It does not work inside of ``jax.jit``.

    The arrays of each dtype are copied into one buffer for one all-reduce. The resulting NumPy and CuPy arrays are
    views of this buffer. MismatchError if containers, keys, shapes or dtypes differ between ranks.

    Parameters
    ----------
    tree : any
        Nested dicts, lists, tuples and named tuples, and containers known to an imported JAX. The leaves are arrays and
        numbers, and None stays None. Keys, in any order, shapes and dtypes are equal on all ranks.

    op, group
        See `mpiddp.distributed`, also for the errors.

    Returns
    -------
    any
        The same containers; a JAX array gives a JAX array, a number a number, anything else a NumPy or CuPy array.

    Examples
    --------
    >>> dist.tree_all_reduce({"weight": np.ones((1, 2)), "steps": 3})["weight"].tolist()
    [[2.0, 2.0]]
    """
    group = member(group, "tree_all_reduce")
    if group is None:
        return None
    leaves: list[Any] = []
    arrays: list[Array] = []

    def collect(part: Any) -> str:
        """Collect the leaves of a part of the tree; return a text of what must be equal on all ranks."""
        node = _node(part)
        if node is not None:
            kind = sorted(map(repr, part)) if isinstance(part, dict) else type(part).__name__
            return f"{kind}({','.join(map(collect, node[0]))})"
        x = contiguous(np.asarray(part) if isinstance(part, int | float | complex) else part, "tree_all_reduce", "tree")
        leaves.append(part)
        arrays.append(x)
        return f"{x.dtype}{x.shape}"

    layout = collect(tree)
    results: list[Any] = [None] * len(leaves)
    for indices in _alike(arrays):
        flat = packed([arrays[index] for index in indices])
        key = ("tree_all_reduce", layout, op, flat.dtype, flat.shape, type(flat))
        plan = group._plans.get(key)
        if plan is None:
            made = planning.make(group._link, "tree_all_reduce", None, flat, flat, op, layout=layout)
            plan = group._plans.remember(key, made)
        dispatch(group, plan, (flat, op), (flat,))
        for index, view in zip(indices, views(flat, [arrays[index].shape for index in indices]), strict=True):
            results[index] = _like(leaves[index], view)

    remaining = iter(results)

    def rebuild(part: Any) -> Any:
        node = _node(part)
        return next(remaining) if node is None else node[1]([rebuild(child) for child in node[0]])

    return rebuild(tree)
