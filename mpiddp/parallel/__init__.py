"""Training one model on many ranks: the only meeting of communication and learning.

Start reading at `naive`. May import everything up to ``nn`` and ``optim``.
"""

from .bucket import GradBucket
from .ddp import DistributedDataParallel
from .naive import average_gradients

__all__ = ["DistributedDataParallel", "GradBucket", "average_gradients"]
