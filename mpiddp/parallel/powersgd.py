"""PowerSGD: a gradient matrix is sent as two thin factors, and the error is added to the next gradient.

For a matrix M (n, m), P = M Q (n, r) is summed and orthonormalised, then Q = M' P (m, r) is summed: (n + m) r numbers
instead of n m. Both sums are one operation of the group's queue, because the second one begins at a different time on
each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddp.algorithms import plan
from mpiddp.arguments import whole
from mpiddp.device import array_namespace
from mpiddp.device.packing import packed, unpack
from mpiddp.distributed import Future, ReduceOp
from mpiddp.distributed.dispatch import dispatch
from mpiddp.distributed.groups import GroupLike, known
from mpiddp.faults.calls import make_call
from mpiddp.mpi.link import Link
from mpiddp.mpi.requests import Steps
from mpiddp.optim.flat import address
from mpiddp.typing import Array

from .buckets import GradBucket
from .hooks import allreduce_hook


@dataclass(eq=False, repr=False)
class PowerSGDState:
    """Options and memory of `powerSGD_hook`.

    Parameters
    ----------
    process_group : ProcessGroup, optional
    matrix_approximation_rank : int
        Begin with 1 or 2 and double it until the accuracy is right.
    start_powerSGD_iter : int
        Iterations before compression, because early gradients hardly have a low rank. With feedback or warm start it
        has to be above 1: buckets get their final order in the first iteration.
    min_compression_rate : float
        Matrices that would shrink by less are sent as they are.
    use_error_feedback : bool
        Add an approximation's error to the next gradient; keeps a copy.
    warm_start : bool
        Begin with the last Q: a power iteration over steps.
    random_seed : int
        Seed of the first Q, equal on all ranks.
    orthogonalization_epsilon, compression_stats_logging_frequency, batch_tensors_with_same_shape
        For compatibility: factors are orthonormalised by QR, which divides by no norm.

    References
    ----------
    T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019; torch's ``PowerSGDState``.
    """

    process_group: GroupLike
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000  # noqa: N815
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        whole("matrix_approximation_rank", self.matrix_approximation_rank, 1)
        whole("start_powerSGD_iter", self.start_powerSGD_iter, 0)
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, because PowerSGD"
                " can only be applied after the first two iterations in DDP."
            )
        self.process_group = known(self.process_group)
        self.rng = np.random.default_rng(self.random_seed)
        self.iter = 0
        self.error_dict: dict[int, Array] = {}
        """For each bucket the error of its last approximation."""
        self.q_memory_dict: dict[int, list[Array]] = {}
        """For each bucket the last Q of its matrices."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next iterations depend on, except the options.

        The arrays are not copied. Each rank has its own, so each saves them.
        """
        return {
            "iter": self.iter,
            "rng": self.rng.bit_generator.state,
            "error_dict": dict(self.error_dict),
            "q_memory_dict": {index: list(qs) for index, qs in self.q_memory_dict.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, with the same buckets; arrays are copied."""
        self.iter = state["iter"]
        self.rng.bit_generator.state = state["rng"]
        self.error_dict = {index: error.copy() for index, error in state["error_dict"].items()}
        self.q_memory_dict = {index: [q.copy() for q in qs] for index, qs in state["q_memory_dict"].items()}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future:  # noqa: N802
    """Average a bucket: its matrices are approximated by low rank, its vectors sent as they are.

    A gradient of more than two axes is a matrix of ``shape[0]`` rows.

    Examples
    --------
    >>> state = dist.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)  # doctest: +SKIP
    >>> ddp.register_comm_hook(state, dist.powerSGD_hook)  # doctest: +SKIP
    """
    compresses = state.iter >= state.start_powerSGD_iter
    if bucket.is_last():
        state.iter += 1
    if not compresses:
        return allreduce_hook(state.process_group, bucket)
    matrices, others = [], []
    for gradient in bucket.gradients():
        matrix = gradient.reshape(gradient.shape[0], -1) if gradient.ndim > 1 and gradient.size else gradient
        if matrix.ndim == 2 and _shrinks(matrix, state):
            matrices.append(matrix)
        else:
            others.append(gradient.reshape(-1))
    group = known(state.process_group)
    rounds = plan.plain(group._link, _rounds, make_call(group._link, "powerSGD"))
    work = dispatch(group, rounds, (state, bucket, matrices, others), (bucket.buffer(),), async_op=True)
    assert work is not None, "it is asynchronous"
    return work.get_future()


def _shrinks(matrix: Array, state: PowerSGDState) -> bool:
    rows, columns = matrix.shape
    rank = min(rows, columns, state.matrix_approximation_rank)
    return bool((rows + columns) * rank * state.min_compression_rate < rows * columns)


def _rounds(link: Link, state: PowerSGDState, bucket: GradBucket, matrices: list[Array], others: list[Array]) -> Steps:
    """Average ``matrices`` in two rounds and ``others`` with the first of them, in place."""
    whole = bucket.buffer()
    xp = array_namespace(whole)
    error = _with_feedback(state, bucket.index(), whole)
    qs = _first_factors(state, bucket.index(), matrices)
    size = whole.dtype.type(link.size)

    ps = [matrix @ q for matrix, q in zip(matrices, qs, strict=True)]
    first = packed([*others, *ps])
    yield from plan.nested_all_reduce(link, first, ReduceOp.SUM)
    first /= size
    unpack(first, [*others, *ps])
    ps = [_orthonormal(p) for p in ps]

    for q, matrix, p in zip(qs, matrices, ps, strict=True):
        xp.matmul(matrix.T, p, out=q)
    if qs:
        second = packed(qs)
        yield from plan.nested_all_reduce(link.after(), second, ReduceOp.SUM)
        second /= size
        unpack(second, qs)

    for matrix, p, q in zip(matrices, ps, qs, strict=True):
        matrix[...] = p @ q.T
    if error is not None:
        error -= whole
        for other in others:  # sent exactly
            offset = (address(other) - address(whole)) // whole.itemsize
            error[offset : offset + other.size] = 0


def _with_feedback(state: PowerSGDState, index: int, whole: Array) -> Array | None:
    """Add the last error to ``whole``, and return a copy, from which the caller makes the next error."""
    if not state.use_error_feedback:
        return None
    error = state.error_dict.get(index)
    if error is None or error.shape != whole.shape or error.dtype != whole.dtype:
        state.error_dict[index] = whole.copy()
    else:
        whole += error
        error[...] = whole
    return state.error_dict[index]


def _first_factors(state: PowerSGDState, index: int, matrices: Sequence[Array]) -> list[Array]:
    """Return an orthonormal Q for each matrix: the last one, or a random one that is the same on all ranks."""
    shapes = [(m.shape[1], min(*m.shape, state.matrix_approximation_rank)) for m in matrices]
    qs = state.q_memory_dict.get(index, [])
    if not state.warm_start or [q.shape for q in qs] != shapes:
        qs = [
            array_namespace(m).asarray(state.rng.standard_normal(shape)).astype(m.dtype)
            for m, shape in zip(matrices, shapes, strict=True)
        ]
    qs = [_orthonormal(q) for q in qs]
    if state.warm_start:
        state.q_memory_dict[index] = qs
    return qs


def _orthonormal(x: Array) -> Array:
    """Return an orthonormal basis of the columns, completed if they depend."""
    xp = array_namespace(x)
    wide: Any = x if x.dtype.itemsize > 2 else x.astype(np.float32)
    return xp.ascontiguousarray(xp.linalg.qr(wide)[0].astype(x.dtype))  # type: ignore[no-any-return]
