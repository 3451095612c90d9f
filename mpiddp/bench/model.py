"""What an all-reduce costs, as a sum of messages, bytes and additions: the formulas, and their fit to measured times.

The time of a message is alpha + bytes * beta [1], that of a reduction bytes * gamma. Where caches hold a part of an
array only, beta grows by spill for the rest of it. With n bytes on p ranks, all in one place, where lg is the logarithm
to base 2, rounded up:

  ring    2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma    [2, 3]
  tree    lg p (alpha + n beta + n gamma)    (recursive doubling)    [3]

On k nodes of m ranks that share their node's link, a message between nodes has an alpha and beta of its own (far), and
the link carries what all m ranks send. Ranks are placed node by node:

* A ring sends one message a step out of each node, and all ranks wait for that one: all steps count as far.
* Recursive doubling sends lg k messages of n bytes far, from all m ranks at once.
* Hierarchical reduces and gathers in the node by halving and doubling, 2 lg m messages; between, each of the m ranks
  does what a ring of k ranks does with its n/m bytes: 2 (k-1) far messages and, on the link, 2 (k-1)/k n bytes.

[1] R. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994.
[2] P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
    Parallel and Distributed Computing 69, 2009.
[3] R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
    International Journal of High Performance Computing Applications 19, 2005.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ALGORITHMS = ("ring", "tree", "hierarchical")


class Cost(NamedTuple):
    """What one all-reduce does, one thing after the other: messages, bytes sent, bytes reduced."""

    near_messages: float
    near_bytes: float
    far_messages: float
    far_bytes: float
    reduced_bytes: float


class Constants(NamedTuple):
    """Seconds for a message, for a byte sent, for a byte reduced; and for a byte of what the caches do not hold."""

    alpha: float
    beta: float
    gamma: float
    spill: float = 0.0
    """On top of beta, for the share of an array that is beyond `cache_bytes`."""
    cache_bytes: float = math.inf

    def spilled(self, size_bytes: float) -> float:
        """Return the share of an array that the caches do not hold."""
        return max(1 - self.cache_bytes / size_bytes, 0.0)


class Machine(NamedTuple):
    """What messages cost in a node and between nodes, and additions in a node."""

    near: Constants
    far: Constants

    def time(self, cost: Cost, size_bytes: float) -> float:
        """Return the seconds that the reduction of an array takes."""
        near, far = self
        seconds = near.alpha * cost.near_messages + far.alpha * cost.far_messages + near.gamma * cost.reduced_bytes
        for place, sent in ((near, cost.near_bytes), (far, cost.far_bytes)):
            seconds += (place.beta + place.spill * place.spilled(size_bytes)) * sent
        return seconds


class Sample(NamedTuple):
    """A measured all-reduce on ranks that are all on one node, or each on its own."""

    algorithm: str
    size_bytes: int
    ranks: int
    seconds: float


def _lg(number: int) -> int:
    return (number - 1).bit_length()


def cost(algorithm: str, size_bytes: float, ranks: int, per_node: int) -> Cost:
    """Return what an all-reduce costs by an algorithm.

    Parameters
    ----------
    algorithm : str
        One of `ALGORITHMS`.
    size_bytes : float
        n, the size of the array.
    ranks, per_node : int
        p, and m: how many of them are on a node.

    Examples
    --------
    >>> cost("ring", 4000, 4, 8)
    Cost(near_messages=6, near_bytes=6000.0, far_messages=0, far_bytes=0, reduced_bytes=3000.0)
    """
    n, m = size_bytes, min(per_node, ranks)
    k = -(-ranks // m)
    p = ranks
    near, far = _lg(m), _lg(k)
    parts = 2 * n * (m - 1) / m, 2 * n * (k - 1) / k  # what a reduce-scatter and an all-gather send
    reduced = n * (p - 1) / p
    match algorithm:
        case "ring" if k > 1:
            return Cost(0, 0, 2 * (p - 1), 2 * n * (p - 1) / p, reduced)
        case "ring":
            return Cost(2 * (p - 1), 2 * n * (p - 1) / p, 0, 0, reduced)
        case "tree":
            return Cost(near, n * near, far, m * n * far, n * (near + far))
        case "hierarchical":
            return Cost(2 * near, parts[0], 2 * (k - 1), parts[1], n * (m - 1) / m + n * (k - 1) / k / m)
    raise ValueError(f"there is no formula for {algorithm!r}; there are {', '.join(ALGORITHMS)}")


def _unknowns(sample: Sample, cache_bytes: float) -> list[float]:
    """Return what alpha, beta, gamma and spill are multiplied by."""
    found = cost(sample.algorithm, sample.size_bytes, sample.ranks, sample.ranks)
    spilled = Constants(0, 0, 0, 0, cache_bytes).spilled(sample.size_bytes)
    return [found.near_messages, found.near_bytes, found.reduced_bytes, found.near_bytes * spilled]


def fit(samples: Sequence[Sample]) -> Constants:
    """Return the constants that explain times with the least squares of relative errors; none is negative.

    Raises
    ------
    ValueError
        If there are too few samples.

    Notes
    -----
    Beta and gamma come apart only where algorithms differ in their shares: a ring sends two bytes for each that it
    reduces, recursive doubling one. What the caches hold is tried out among the sizes of the samples, where there are
    enough of them.
    """
    if len(samples) < 3:
        raise ValueError(f"a fit of three constants needs three measured times or more, got {len(samples)}")
    best, least = Constants(0, 0, 0), math.inf
    measured = sorted({sample.size_bytes for sample in samples})
    for cache_bytes in [math.inf, *(measured[1:-2] if len(samples) >= _ENOUGH else ())]:
        rows = np.array([_unknowns(each, cache_bytes) for each in samples]) / [[each.seconds] for each in samples]
        found, left = _nonnegative(rows)
        if left < least * _BETTER:
            best, least = Constants._make([*found, cache_bytes]), left
    return best


_ENOUGH = 8
_BETTER = 0.9
"""A cache is assumed where it takes a tenth off the squares of the errors."""


def _nonnegative(rows: npt.NDArray[np.float64]) -> tuple[list[float], float]:
    """Return the constants, none negative, for which ``rows`` times them is nearest to one; and the squares left."""
    scale = np.abs(rows).max(axis=0) + np.finfo(float).tiny
    count = rows.shape[1]
    best, least = np.zeros(count), math.inf
    # So few unknowns that one can try which of them are zero.
    for chosen in range(1, 1 << count):
        kept = [index for index in range(count) if chosen >> index & 1]
        found = np.zeros(count)
        found[kept] = np.linalg.lstsq(rows[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0] / scale[kept]
        left = float(np.square(rows @ found - 1).sum())
        if (found >= 0).all() and left < least:
            best, least = found, left
    return [float(each) for each in best], least


def relative_errors(samples: Sequence[Sample], constants: Constants) -> list[float]:
    """Return how far off the formulas are for each sample: 0.1 is a tenth too long, -0.1 a tenth too short."""
    machine = Machine(constants, constants)
    return [
        machine.time(cost(each.algorithm, each.size_bytes, each.ranks, each.ranks), each.size_bytes) / each.seconds - 1
        for each in samples
    ]


def exposed(each_s: float, count: int, compute_s: float) -> float:
    """Return the seconds that communication adds to a backward pass.

    Parameters
    ----------
    each_s : float
        What one bucket takes; they are reduced one after the other, while the computation goes on.
    count : int
        Their number; they become full at equal intervals.
    compute_s : float
        What the computation takes.
    """
    # The last bucket is full at the end; those before it delay it if they are not through by then.
    return max((count - index) * each_s - compute_s * (count - 1 - index) / count for index in range(count))


def fastest(machine: Machine, size_bytes: float, ranks: int, per_node: int) -> str:
    """Return the algorithm that takes least."""
    return min(ALGORITHMS, key=lambda name: machine.time(cost(name, size_bytes, ranks, per_node), size_bytes))


def best_bucket(
    machine: Machine, total_bytes: int, ranks: int, per_node: int, compute_s: float
) -> tuple[float, str, float]:
    """Return the size of equal buckets that leaves least communication exposed, its algorithm, and what is exposed."""
    found = []
    for power in range(15):
        size = total_bytes / 2**power
        name = fastest(machine, size, ranks, per_node)
        each_s = machine.time(cost(name, size, ranks, per_node), size)
        found.append((exposed(each_s, 2**power, compute_s), -size, name))
    seconds, negative, name = min(found)
    return -negative, name, seconds
