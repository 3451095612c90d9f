"""Communication hooks: other ways to average a bucket than one all-reduce of what it holds.

A hook gets its state and a `GradBucket` whose buffer is not divided by anything, and returns a `Work` or a `Future` of
the averaged gradients. `DistributedDataParallel.register_comm_hook` takes it.
"""

from .default import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from .powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = [
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "powerSGD_hook",
]
