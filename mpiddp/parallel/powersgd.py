"""PowerSGD: send a gradient matrix as two thin factors, and add the error of this approximation to the next gradient.

For a matrix M (n, m), the ranks sum P = M Q (n, r) and orthonormalise it. Then they sum Q = M' P (m, r). So they send
(n + m) r numbers instead of n m. The second sum begins at a different time on each rank. Therefore both sums are one
operation in the group's queue; as two, their order among other operations could differ between ranks.
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
    """The options of `powerSGD_hook`, and the arrays that it keeps from step to step.

    Parameters
    ----------
    process_group : ProcessGroup, optional
    matrix_approximation_rank : int
        The number of columns r of the factors. Begin with 1 or 2 and double it until the accuracy is right.
    start_powerSGD_iter : int
        Number of iterations before compression begins, because early gradients hardly have a low rank. With error
        feedback or warm start it has to be above 1, because buckets get their final order in the first iteration.
    min_compression_rate : float
        Matrices that compression would shrink by a smaller factor are sent as they are.
    use_error_feedback : bool
        Add the error of an approximation to the next gradient. The errors take as much memory as the gradients.
    warm_start : bool
        Begin each step with the Q of the step before, so that the steps form a power iteration.
    random_seed : int
        Seed of the random Q with which the factors begin. It has to be equal on all ranks.
    orthogonalization_epsilon, compression_stats_logging_frequency, batch_tensors_with_same_shape
        Accepted for compatibility with torch, without effect. Factors are orthonormalised by QR, which needs no
        epsilon.

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
        """For each bucket, by its index, the error of its last approximation."""
        self.q_memory_dict: dict[int, list[Array]] = {}
        """For each bucket, by its index, the last Q of each of its matrices."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next iterations depend on, except the options.

        The arrays are not copied. The errors differ between ranks, so each rank has to save its own state.
        """
        return {
            "iter": self.iter,
            "rng": self.rng.bit_generator.state,
            "error_dict": dict(self.error_dict),
            "q_memory_dict": {index: list(qs) for index, qs in self.q_memory_dict.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`, of a model with the same buckets. The arrays are copied."""
        self.iter = state["iter"]
        self.rng.bit_generator.state = state["rng"]
        self.error_dict = {index: error.copy() for index, error in state["error_dict"].items()}
        self.q_memory_dict = {index: [q.copy() for q in qs] for index, qs in state["q_memory_dict"].items()}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future:  # noqa: N802
    """Average a bucket, with low-rank approximations of its matrices once ``start_powerSGD_iter`` iterations are over.

    Vectors, and matrices that this would hardly shrink, are averaged as they are. A gradient with more than two axes
    counts as a matrix of ``shape[0]`` rows.

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
    """Average the gradients in place: ``matrices`` by two all-reduces, ``others`` exactly, with the first of them."""
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
        for other in others:  # they were sent exactly, so they have no error
            offset = (address(other) - address(whole)) // whole.itemsize
            error[offset : offset + other.size] = 0


def _with_feedback(state: PowerSGDState, index: int, whole: Array) -> Array | None:
    """Add the last error to ``whole``, and return a copy of the sum, from which the caller computes the next error.

    Return None without error feedback.
    """
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
    """Return an orthonormal Q for each matrix: that of the last step, or a random one that all ranks have in common."""
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
    """Return an orthonormal basis of the columns. If they are linearly dependent, other vectors complete the basis."""
    xp = array_namespace(x)
    wide: Any = x if x.dtype.itemsize > 2 else x.astype(np.float32)
    return xp.ascontiguousarray(xp.linalg.qr(wide)[0].astype(x.dtype))  # type: ignore[no-any-return]
