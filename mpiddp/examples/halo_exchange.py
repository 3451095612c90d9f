"""``mpirun -np 4 python -m mpiddp.examples.halo_exchange``: heat on a plate in blocks, and its gradient.

Each rank of a mesh holds a block of the plate; the walls are cold. Before each step neighbours exchange their outer
rows and columns by ``nn.functional.all_to_all``, with nothing for all others. Backward exchanges the other way: each
rank gets the derivative of the heat at the centre by its points at the start. Both equal those of the whole plate on
one rank.

Output::

    4 ranks as 2 x 2, each with 6 x 6 of 12 x 12 points
    heat at the centre after 20 steps: 0.497
    as on one rank: True
    gradient as on one rank: True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Tensor, cat
from mpiddp.examples.printing import print_once
from mpiddp.typing import Array

POINTS, STEPS, RATE = 12, 20, 0.2


def strip(u: Any, axis: int, cut: slice) -> Any:
    """Return some rows (axis 0) or columns (axis 1)."""
    return u[cut] if axis == 0 else u[:, cut]


def with_cold_walls(u: Tensor, axis: int) -> Tensor:
    wall = np.zeros_like(strip(u.data, axis, slice(1)))
    return cat([wall, u, wall], axis)


def with_halo(u: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    """Return a block between the neighbours' nearest rows or columns; zeros at a wall."""
    me = group.rank()
    inputs = [strip(u, axis, slice(0))] * group.size()  # nothing
    outputs = [np.empty_like(x.data) for x in inputs]
    wall = np.zeros_like(strip(u.data, axis, slice(1)))
    for neighbour, edge in ((me - 1, slice(1)), (me + 1, slice(-1, None))):
        if 0 <= neighbour < group.size():
            inputs[neighbour], outputs[neighbour] = strip(u, axis, edge), np.empty_like(wall)
    received = nn.functional.all_to_all(outputs, inputs, group)
    before = received[me - 1] if me > 0 else wall
    after = received[me + 1] if me + 1 < group.size() else wall
    return cat([before, u, after], axis)


def heat(u: Tensor, surround: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the heat after all steps; ``surround`` adds a row or column on either side."""
    for _ in range(STEPS):
        rows, columns = surround(u, 0), surround(u, 1)
        u = u + RATE * (rows[:-2] + rows[2:] + columns[:, :-2] + columns[:, 2:] - 4 * u)
    return u


def main() -> None:
    dist.init_process_group()
    size = dist.get_world_size()
    n_rows = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    mesh = dist.init_device_mesh("cpu", (n_rows, size // n_rows), mesh_dim_names=("row", "column"))

    start = np.random.default_rng(0).uniform(0, 1, (POINTS, POINTS))
    centre = np.zeros_like(start)
    centre[POINTS // 2, POINTS // 2] = 1

    def block(plate: Array) -> Array:
        for axis, name in enumerate(("row", "column")):
            plate = np.split(plate, mesh[name].size(), axis)[mesh[name].get_local_rank()]
        return plate.copy()

    whole = Tensor(start, requires_grad=True)
    expected = (heat(whole, with_cold_walls) * centre).sum()
    expected.backward()

    mine = Tensor(block(start), requires_grad=True)
    groups = mesh.get_all_groups()
    found = (heat(mine, lambda u, axis: with_halo(u, axis, groups[axis])) * block(centre)).sum()
    found.backward()
    total = nn.functional.all_reduce(found.detach()).item()
    equal = np.array([np.allclose(mine.grad, block(whole.grad), rtol=1e-12)])  # type: ignore[arg-type]
    dist.all_reduce(equal, dist.ReduceOp.MIN)

    height, width = mine.shape
    print_once(f"{size} ranks as {' x '.join(map(str, mesh.shape))}, each with {height} x {width} of 12 x 12 points")
    print_once(f"heat at the centre after {STEPS} steps: {total:.3f}")
    print_once(f"as on one rank: {bool(np.isclose(total, expected.item(), rtol=1e-12))}")
    print_once(f"gradient as on one rank: {bool(equal[0])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
