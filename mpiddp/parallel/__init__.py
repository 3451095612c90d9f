"""Data parallelism: where communication and learning meet. Read `naive`, `buckets`, `reducer`, `wrapper`, `ddp`.

Names of torch keep torch's meaning; docstrings say the differences. ``process_group`` is all ranks by default.
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
