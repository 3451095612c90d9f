"""``mpirun -np 2 python -m mpiddp.examples.jax_grad``: a JAX program in data parallel.

``dist.tree_all_reduce`` averages a tree of read-only arrays, as ``jax.grad`` returns it, over the ranks, in one
message, and returns a new one. The losses are those of all samples on one rank. It needs ``pip install jax``.

Output::

    step  loss, ranks  loss, whole
       1        2.880        2.880
       2        2.272        2.272
       3        1.966        1.966
       4        1.803        1.803
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_once

jax: Any = importlib.import_module("jax") if importlib.util.find_spec("jax") else None
STEPS, SAMPLES = 4, 24


def loss(parameters: Any, x: Any, y: Any) -> Any:
    hidden = jax.numpy.tanh(x @ parameters["first"])
    return jax.numpy.mean((hidden @ parameters["second"] - y) ** 2)


def train(x: Any, y: Any, mean: Any) -> list[float]:
    """Return the losses; ``mean`` averages a tree over the ranks."""
    rng = np.random.default_rng(0)
    shapes = {"first": (3, 4), "second": (4, 1)}
    parameters = {
        name: jax.numpy.asarray(rng.standard_normal(shape), dtype="float32") for name, shape in shapes.items()
    }
    step = jax.jit(jax.value_and_grad(loss))
    losses = []
    for _ in range(STEPS):
        value, gradients = mean(step(parameters, x, y))
        parameters = jax.tree_util.tree_map(lambda w, gradient: w - 0.1 * gradient, parameters, gradients)
        losses.append(float(value))
    return losses


def main() -> None:
    if jax is None:
        print_once("JAX is not installed, so there is nothing to show: pip install jax")
        return
    dist.init_process_group()
    rng = np.random.default_rng(1)
    x = rng.standard_normal((SAMPLES, 3)).astype(np.float32)
    y = x[:, :1] * x[:, 1:2]
    whole = train(x, y, lambda tree: tree)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    losses = train(x[mine], y[mine], lambda tree: dist.tree_all_reduce(tree, dist.ReduceOp.AVG))
    print_once("step  loss, ranks  loss, whole")
    for step, (ours, theirs) in enumerate(zip(losses, whole, strict=True), start=1):
        print_once(f"{step:4}  {ours:11.3f}  {theirs:11.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
