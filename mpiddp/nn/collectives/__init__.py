"""Collectives and messages with gradients: ``torch.distributed.nn.functional`` for tensors of mpiddp.

Their backward is the adjoint collective: each rank's gradient is that of the sum of what all ranks call ``backward``
on. They share:

- The operation is recorded on all ranks of the group if the input of one of them requires a gradient; the ranks
  exchange one byte to know. A rank whose own input requires none takes part in backward all the same, where torch
  waits for ever.
- Every rank calls ``backward`` on something that the output is a part of, ``0 * output.sum()`` if nothing else. One
  that does not is missing in the adjoint collective, whose timeout says so.
- Recording is on for all ranks of a call or for none (`no_grad`): RuntimeError on all of them else.
- ``tensor`` and the elements of lists are tensors or arrays of any layout; inputs stay as they are. Arrays to write to
  are C-contiguous, and share their memory with the tensor that is returned.
- ``src`` and ``dst`` are global ranks. ``group`` is all ranks by default; on a rank that is not in it a call warns and
  returns None.
- Reductions with a gradient are SUM, AVG and PREMUL_SUM; another one raises ValueError where it is recorded.
- There are no second derivatives. Errors of the arguments are those of `mpiddp.distributed`.
"""

from .p2p import recv, send
from .rooted import broadcast, gather, reduce, scatter
from .symmetric import all_gather, all_reduce, all_to_all, all_to_all_single, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
