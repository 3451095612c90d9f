"""The arrays of one benchmarked operation: their sizes, their contents, and whether the result is right.

Sizes are as in nccl-tests: S is all bytes that one rank sends or receives, so for operations on blocks the largest
array of the call, and each rank's block is S / n.

References
----------
https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, and for gather, scatter and send/recv their ``GetBw`` in src.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddp.typing import Array

from . import reference

Allocate = Callable[[int, np.dtype[Any]], Array]
"""Makes a flat array of so many elements; called by all ranks alike."""

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ONE_ARRAY = ("all_reduce", "broadcast", "reduce")
# Which arrays hold a block for every rank; the others hold one block.
_ALL_BLOCKS = {
    "all_gather": ("output",),
    "gather": ("output",),
    "reduce_scatter": ("x",),
    "scatter": ("x",),
    "all_to_all": ("x", "output"),
}


def bus_factor(operation: str, size: int) -> float:
    """Return bus bandwidth over algorithm bandwidth S / t: what the slowest link carries, as a share of S.

    Examples
    --------
    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if operation == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if operation in _ALL_BLOCKS else 1.0


class Buffers:
    """The arrays of an operation on one rank.

    Parameters
    ----------
    operation : str
        Its name in ``mpiddp.distributed``; all_gather, reduce_scatter and all_to_all stand for the forms on one array.
    rank, size : int
        This rank, and the number of ranks.
    size_bytes : int
        S; rounded down to whole elements for each rank, at least one.
    dtype : dtype
        Of the arrays.
    op : str
        The reduction, one of ``cli.REDUCTIONS``.
    allocate : callable
        Makes the arrays.
    """

    def __init__(
        self,
        operation: str,
        rank: int,
        size: int,
        size_bytes: int,
        dtype: np.dtype[Any],
        op: str = "sum",
        allocate: Allocate = np.empty,
    ) -> None:
        self.operation, self.rank, self.size = operation, rank, size
        self.dtype, self.op = dtype, op
        self.root = 0
        blocks = size if operation in _ALL_BLOCKS else 1
        self.count = 0 if operation == "barrier" else max(size_bytes // blocks // dtype.itemsize, 1)
        """Elements of each rank's block, the count that nccl-tests prints."""
        self.total_bytes = self.count * blocks * dtype.itemsize
        """S."""
        whole = _ALL_BLOCKS.get(operation, ())
        self.x: Array = allocate(self.count * (size if "x" in whole else 1), dtype)
        self.output: Array = (
            self.x if operation in _ONE_ARRAY else allocate(self.count * (size if "output" in whole else 1), dtype)
        )

    def blocks(self, x: Array) -> list[Array]:
        """Return the blocks of an array that has one for every rank."""
        return [x[rank * self.count : (rank + 1) * self.count] for rank in range(self.size)]

    def rest(self) -> None:
        """Fill the arrays with what stays as it is however often it is reduced: no overflow slows the loop down."""
        self.x[...] = 1 if self.op == "product" else 0
        self.output[...] = self.x[0] if self.x.size else 0

    def fill(self) -> None:
        """Fill the input with this rank's pattern, and the output with what is wrong."""
        if self.operation not in _ONE_ARRAY:
            self.output[...] = 1 if self.dtype.kind == "b" else 101
        reference.fill(self.x, self._pattern(self.rank))

    def _pattern(self, rank: int) -> Array:
        return reference.pattern(rank, self.dtype, self.op)

    def count_wrong(self, *, spoils_inputs: bool = False) -> int:
        """Return how many elements on this rank are not what the operation should have made of `fill`.

        Parameters
        ----------
        spoils_inputs : bool, default False
            Whether a reduction may leave anything in the arrays of ranks that get no result, as Gloo's does.
        """
        on_root = self.rank == self.root
        count, output = self.count, self.output
        match self.operation:
            case "all_reduce":
                return reference.count_wrong(output, reference.reduced(self.size, self.dtype, self.op))
            case "reduce" if spoils_inputs and not on_root:
                return 0
            case "reduce":  # the other ranks' arrays stay as they are
                total = reference.reduced(self.size, self.dtype, self.op)
                return reference.count_wrong(output, total if on_root else self._pattern(self.rank))
            case "broadcast":
                return reference.count_wrong(output, self._pattern(self.root))
            case "reduce_scatter":
                total = reference.reduced(self.size, self.dtype, self.op)
                return reference.count_wrong(output, total, self.rank * count)
            case "scatter":
                return reference.count_wrong(output, self._pattern(self.root), self.rank * count)
            case "send_recv":
                return reference.count_wrong(output, self._pattern((self.rank - 1) % self.size))
            case "gather" if not on_root:
                return 0
            case "all_gather" | "gather":
                return self._wrong_blocks(first=0)
            case "all_to_all":
                return self._wrong_blocks(first=self.rank * count)
        return 0

    def _wrong_blocks(self, first: int) -> int:
        """Compare each block of the output with its rank's pattern."""
        return sum(
            reference.count_wrong(block, self._pattern(rank), first)
            for rank, block in enumerate(self.blocks(self.output))
        )
