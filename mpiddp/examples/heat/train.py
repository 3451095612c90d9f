"""Learn the heat equation from solvers that run meanwhile: ``mpirun -n 1 ./heat 2000 : -n 2 python train.py 1``.

The argument 1 is the number of solvers, which are the first ranks; the other ranks train. ``train.py 1 BATCHES`` ends
after BATCHES batches and stops the solvers. ``train.py 1 BATCHES KEPT`` trains on a fixed set of samples, for
comparison: each rank keeps the samples that it receives of a solver's first KEPT simulations, and trains on them again
and again.
"""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.data import ArrayDataset, DataLoader, Stream

N, STEPS, EVERY, BATCH = 16, 100, 5, 32


def solve(temperatures: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return inputs (20, 6) and fields (20, 256) of one simulation, as the solver sends them."""
    u = np.full((N, N), temperatures[0], np.float32)
    u[:, 0], u[:, -1], u[0], u[-1] = temperatures[3], temperatures[4], temperatures[1], temperatures[2]
    x, fields = [], []
    for step in range(1, STEPS + 1):
        inner = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
        u[1:-1, 1:-1] += np.float32(0.2) * inner
        if step % EVERY == 0:
            x.append([*temperatures, step / STEPS])
            fields.append(u.flatten())
    return np.array(x, np.float32), np.array(fields)


def kept(stream: Stream, simulations: int) -> Iterator[Any]:
    """Receive the samples of the first ``simulations`` simulations; then yield batches of them without an end."""
    found = []
    for x, u, simulation, _ in stream:
        found += [(x[i], u[i]) for i in range(len(x)) if simulation[i] < simulations]
        if simulation.min() >= simulations:
            break
    stream.close()
    data = ArrayDataset(*map(np.array, zip(*found, strict=True)))
    for epoch in itertools.count():
        yield from DataLoader(data, BATCH, shuffle=True, drop_last=True, generator=epoch)


def main() -> None:
    solvers, limit, simulations = (int(word) for word in [*sys.argv[1:], "0", "0"][:3])
    world = MPI.COMM_WORLD
    # Only the ranks that train call Create_group, and all that follows. The solvers take no part.
    dist.init_process_group(comm=world.Create_group(world.group.Excl(range(solvers))))
    dist.manual_seed(1)
    layers = [nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, N * N)]
    model = dist.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    stream = Stream(
        world,
        range(solvers),
        batch_size=BATCH,
        capacity=2000,
        policy="fifo" if simulations else "reservoir",
        min_fill=200,
        drop_last=True,
    )
    batches: Iterator[Any] = kept(stream, simulations) if simulations else stream
    with stream, dist.Join([model]):  # the sources of one rank may end before those of another
        for x, u, *_ in itertools.islice(batches, limit or None):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), u.reshape(len(u), -1)).backward()
            optimizer.step()

    random = np.random.default_rng(5)
    x, u = map(np.concatenate, zip(*(solve(random.random(5, np.float32)) for _ in range(50)), strict=True))
    error = np.sqrt(np.mean((model.module(x).data - u) ** 2))
    counts = np.array([stream.metrics["received"], stream.metrics["drawn"]])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"{counts[0]} samples received, {counts[1]} drawn, error {error:.4f} on simulations that it has not seen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
