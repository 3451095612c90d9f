"""Data sets, samplers and the loader.

Samplers know how many ranks there are and which this one is; nothing here communicates. May import ``distributed``
and what is below it, and knows nothing of ``nn``.
"""

from .collate import default_collate
from .dataset import ArrayDataset, BatchDataset, Dataset, Subset, random_split
from .distributed_sampler import DistributedSampler
from .global_batch import BatchShare, GlobalBatchSampler
from .loader import DataLoader
from .mnist_idx import mnist
from .partition import DataPartitioner, Partition
from .permutation import randperm
from .prototypes import synthetic
from .sampler import BatchSampler, RandomSampler, SequentialSampler
from .uci_digits import digits

__all__ = [
    "ArrayDataset",
    "BatchDataset",
    "BatchSampler",
    "BatchShare",
    "DataLoader",
    "DataPartitioner",
    "Dataset",
    "DistributedSampler",
    "GlobalBatchSampler",
    "Partition",
    "RandomSampler",
    "SequentialSampler",
    "Subset",
    "default_collate",
    "digits",
    "mnist",
    "random_split",
    "randperm",
    "synthetic",
]
