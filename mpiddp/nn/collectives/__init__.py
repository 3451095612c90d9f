"""Collectives and messages with gradients: ``torch.distributed.nn.functional`` for tensors of mpiddp.

Backward is the adjoint collective: each rank's gradient is that of the sum of all ranks' losses. They share:

- A call is recorded on all ranks of the group if one rank's input requires a gradient (the ranks exchange one byte);
  all take part in backward, where torch waits for ever.
- Every rank calls ``backward`` on a result that depends on the output, ``0 * output.sum()`` if nothing else; the
  timeout names a missing rank.
- Recording is on for all ranks of a call or for none (`no_grad`), else RuntimeError on all of them.
- Inputs are tensors or arrays of any layout, of equal shape and dtype on all ranks except in all_to_all and messages.
  Arrays to write to are C-contiguous, and share their memory with the returned tensor.
- ``src`` and ``dst`` are global ranks. ``group`` is all ranks by default; a rank outside of it is warned and gets None.
- ``op`` : SUM, AVG and PREMUL_SUM have a gradient; another raises ValueError where it is recorded.
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
