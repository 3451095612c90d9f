"""Data parallelism: all ranks train the same model, each on its own part of the data.

Read the modules in this order: `naive`, `buckets`, `reducer`, `wrapper`, `ddp`. Names taken from torch have torch's
meaning; docstrings mention the differences. A ``process_group`` that is not given stands for all ranks.
"""

from mpiddp import moved

from .buckets import GradBucket as GradBucket
from .data_parallel import DataParallel as DataParallel
from .ddp import DistributedDataParallel as DistributedDataParallel
from .hooks import (
    allreduce_hook as allreduce_hook,
    bf16_compress_hook as bf16_compress_hook,
    fp16_compress_hook as fp16_compress_hook,
    noop_hook as noop_hook,
)
from .join import Join as Join, Joinable as Joinable, JoinHook as JoinHook
from .local_sgd import DiLoCo as DiLoCo
from .naive import average_gradients as average_gradients
from .powersgd import PowerSGDState as PowerSGDState, powerSGD_hook as powerSGD_hook
from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from .timeline import Timeline as Timeline
from .zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer

moved.explain(__name__)
