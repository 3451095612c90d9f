"""The backward pass: run the nodes behind a loss in reverse sequence, and add up gradients in the leaves."""

import contextlib
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from mpiddp.device import array_namespace
from mpiddp.device.namespace import cupy_is_loaded
from mpiddp.device.place import returning, stand_at
from mpiddp.typing import Array

from .function import Function, Variable, no_grad

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


class _Running(threading.local):
    """The callbacks that wait for the end of this thread's backward; None while no backward runs."""

    callbacks: list[Callable[[], object]] | None = None


_running = _Running()


def queue_callback(function: Callable[[], object]) -> None:
    """Call ``function()`` once, at the end of this thread's backward, after the last gradient and hook.

    Callbacks run in the order in which they were queued, and may queue others. An error in backward drops them.
    """
    if _running.callbacks is None:
        raise RuntimeError("Final callbacks can only be installed during backward pass.")
    _running.callbacks.append(function)


def run_backward(root: Variable, gradient: Array, retain_graph: bool) -> None:
    outer, callbacks = _running.callbacks, list[Callable[[], object]]()
    _running.callbacks = callbacks
    try:
        with no_grad(), returning() if cupy_is_loaded() else contextlib.nullcontext():
            if root.grad_fn is None:
                leaves = _Leaves({root: 1})
                leaves.add(root, gradient, owned=False)
            else:
                _run_nodes(root.grad_fn, gradient, retain_graph)
            for callback in callbacks:
                callback()
    finally:
        _running.callbacks = outer


def _run_nodes(root: Function, gradient: Array, retain_graph: bool) -> None:
    nodes, uses = _reachable(root)
    leaves, gradients = _Leaves(uses), {root: gradient}
    on_devices = cupy_is_loaded()  # a node or a sum must run on the device of its gradient
    for node in nodes:
        grad = gradients.pop(node, None)
        if on_devices:
            stand_at(grad)
        edges = node.edges or ()
        if grad is None:
            results: tuple[Any, ...] = (None,) * len(edges)
        else:
            if grad.dtype != node.output_dtype:
                # Otherwise one float64 in a loss would make the whole backward float64.
                grad = grad.astype(node.output_dtype)

            results = type(node).backward(node, grad)
            if results.__class__ is not tuple:
                results = (results,)
            if len(results) < len(edges):
                results = _padded(node, results)
        for edge, result in zip(edges, results, strict=False):
            if edge is None:
                continue
            if on_devices:
                stand_at(result)
            if isinstance(edge, Variable):
                # A leaf must not keep an array that another node or input holds.
                owned = result is not grad and sum(other is result for other in results) == 1
                leaves.add(edge, result, owned)
            elif result is not None:
                before = gradients.get(edge)
                gradients[edge] = result if before is None else before + result
        if not retain_graph:
            node.release()


def _padded(node: Function, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``results`` with None added for each input that is left: these are options, which have no gradient."""
    edges = node.edges or ()
    if any(edge is not None for edge in edges[len(results) :]):
        raise RuntimeError(
            f"{type(node).__name__}.backward returned {len(results)} gradients, expected {len(edges)}: one for each "
            "input of forward, None where it has none"
        )
    return results + (None,) * (len(edges) - len(results))


def _reachable(root: Function) -> tuple[list[Function], dict[Variable, int]]:
    """Return the nodes behind ``root``, latest first, and each leaf's number of uses."""
    seen = {root}
    nodes = [root]
    uses: dict[Variable, int] = {}
    for node in nodes:
        if node.edges is None:
            raise RuntimeError(_FREED)
        for edge in node.edges:
            if isinstance(edge, Function):
                if edge not in seen:
                    seen.add(edge)
                    nodes.append(edge)
            elif edge is not None:
                uses[edge] = uses.get(edge, 0) + 1
    nodes.sort(key=attrgetter("sequence"), reverse=True)
    return nodes, uses


class _Leaves:
    """The leaves of one backward: how many contributions each still lacks, and what it has received."""

    def __init__(self, uses: dict[Variable, int]) -> None:
        self._uses = uses
        self._reached: set[Variable] = set()

    def add(self, leaf: Variable, grad: Array | None, owned: bool) -> None:
        """Add a contribution, which may be None, to a leaf's gradient.

        After the last contribution call the leaf's hooks, unless all were None.
        """
        if grad is not None:
            self._reached.add(leaf)
            accumulate(leaf, grad, owned)
        self._uses[leaf] -= 1
        if self._uses[leaf] == 0 and leaf in self._reached and leaf.post_accumulate_grad_hooks:
            for hook in tuple(leaf.post_accumulate_grad_hooks.values()):
                hook(leaf)


def accumulate(leaf: Variable, grad: Array, owned: bool) -> None:
    """Add ``grad`` to a leaf's gradient. If ``owned``, nothing else holds ``grad``, and the leaf may keep it."""
    data, slot = leaf.data, leaf.grad_slot
    if grad.shape != data.shape:
        raise RuntimeError(
            f"a gradient of shape {grad.shape} was returned for a leaf of shape {data.shape}; backward has to return "
            "the shape of the input"
        )
    xp = array_namespace(data)
    if leaf.grad is not None:
        xp.add(leaf.grad, grad, out=leaf.grad, casting="same_kind")
    elif slot is not None:
        if grad is not slot:
            xp.copyto(slot, grad)
        leaf.grad = slot
    elif (
        owned
        and grad.__class__ is data.__class__
        and grad.base is None
        and grad.dtype == data.dtype
        and grad.flags.c_contiguous
    ):
        leaf.grad = grad
    else:
        leaf.grad = xp.array(grad, dtype=data.dtype, order="C")
