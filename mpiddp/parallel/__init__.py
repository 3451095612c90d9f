"""Data parallelism: where communication and learning meet. Read `naive`, `buckets`, `reducer`, `wrapper`, `ddp`.

Names of torch keep torch's meaning; docstrings say the differences. ``process_group`` is all ranks by default.
"""

from mpiddp import moved

from .buckets import GradBucket
from .data_parallel import DataParallel
from .ddp import DistributedDataParallel
from .hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from .join import Join, Joinable, JoinHook
from .local_sgd import DiLoCo
from .naive import average_gradients
from .powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from .replicas import BufferCommHookLocation
from .sync_batchnorm import SyncBatchNorm
from .timeline import Timeline
from .zero import ZeroRedundancyOptimizer

__all__ = [
    "BufferCommHookLocation",
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "GradBucket",
    "Join",
    "JoinHook",
    "Joinable",
    "PowerSGDState",
    "SyncBatchNorm",
    "Timeline",
    "ZeroRedundancyOptimizer",
    "allreduce_hook",
    "average_gradients",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "powerSGD_hook",
]

moved.explain(__name__)
