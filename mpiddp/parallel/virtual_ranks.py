"""Virtual ranks: micro-batches whose gradients are added in an order that does not depend on the number of ranks."""

from collections.abc import Sequence

import numpy as np

from mpiddp.algorithms.pairs import merges, shares
from mpiddp.device import is_device_array
from mpiddp.distributed import ProcessGroup
from mpiddp.mpi.reduction import is_half
from mpiddp.typing import Array

from .buckets import GradBucket, ParameterLike


class PartialSums:
    """The virtual ranks of one rank, and the sums of their gradients in the running step.

    A binary tree over all virtual ranks defines the order in which gradients are added. A sum is open until the
    gradients of its right half are known. ``mine`` holds this rank's virtual ranks, ``done`` the number of those whose
    micro-batch is over, and ``used`` the numbers of the parameters that have had a gradient in this step. ``across`` is
    the order in which the ranks' arrays are added (`mpiddp.algorithms.pairs.merges`).
    """

    def __init__(
        self, virtual_ranks: int, group: ProcessGroup, named_parameters: Sequence[tuple[str, ParameterLike]]
    ) -> None:
        for name, parameter in named_parameters:
            if is_half(parameter.dtype) or is_device_array(parameter.data):
                raise ValueError(
                    f"virtual ranks need parameters of float32 or float64 on the host, and {name} is {parameter.dtype}"
                    f"{' on a GPU' if is_device_array(parameter.data) else ''}: partial sums of half precision are"
                    " rounded on each rank, and libraries of GPUs add in an order of their own"
                )
        parts = shares(virtual_ranks, group.size())
        self.virtual_ranks = virtual_ranks
        self.mine = parts[group.rank()]
        self.across = merges(range(virtual_ranks), parts)
        self._merges = merges(self.mine, [range(leaf, leaf + 1) for leaf in self.mine])
        self.done = 0
        self.at_last = False
        """True inside this rank's last micro-batch of a step, whose backward sends the sums."""
        self.used: set[int] = set()
        self._depth = 0
        self._memory: list[dict[int, Array]] = []
        """The arrays of the open sums, by depth in the tree and number of the bucket. Later steps use them again."""

    def check_turn(self) -> None:
        """Raise RuntimeError unless this rank's last micro-batch of a step runs, whose backward sends the sums."""
        if not self.at_last:
            raise RuntimeError(
                "a model with virtual ranks is trained inside of steps() or micro_batch(), which say whose micro-batch"
                " this is, with one backward each, after any others under no_sync(); evaluate under no_grad()"
            )

    def reset(self) -> None:
        self.done = self._depth = 0
        self.at_last = False
        self.used.clear()

    def keep(self, buckets: Sequence[GradBucket], weight: float) -> None:
        """Begin a sum with the buckets' gradients times ``weight``. Add up all sums that this micro-batch completes."""
        if self._depth == len(self._memory):
            self._memory.append({})
        for bucket in buckets:
            buffer, arrays = bucket.buffer(), self._memory[self._depth]
            kept = arrays.get(bucket.index())
            if kept is None or kept.size != buffer.size or kept.dtype != buffer.dtype:
                kept = arrays[bucket.index()] = np.empty_like(buffer)
            np.multiply(buffer, buffer.dtype.type(weight), out=kept)
            for depth in range(self._depth, self._depth - self._merges[self.done], -1):
                left, right = (self._memory[at][bucket.index()] for at in (depth - 1, depth))
                np.add(left, right, out=left)
        self._depth += 1 - self._merges[self.done]
        self.done += 1

    def add_to(self, bucket: GradBucket, weight: float) -> float:
        """Add the open sums to the gradients of the last micro-batch, in the bucket.

        Return the factor by which the all-reduce still has to multiply the bucket.
        """
        buffer = bucket.buffer()
        if len(self.mine) > 1 or len(self.across) == 1:
            np.multiply(buffer, buffer.dtype.type(weight), out=buffer)
            weight = 1.0  # with a single micro-batch the all-reduce multiplies instead, with the same bits
        for depth in reversed(range(self._depth)):
            np.add(self._memory[depth][bucket.index()], buffer, out=buffer)
        return weight
