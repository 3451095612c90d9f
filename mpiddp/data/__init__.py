"""Data sets, samplers and the loader.

Samplers know how many ranks there are and which this one is, and nothing here communicates but `shared_on_node`. May
import ``distributed`` and what is below it, and knows nothing of ``nn``.
"""

from .collate import default_collate
from .dataset import ArrayDataset, BatchDataset, Dataset, Subset, random_split
from .distributed_sampler import DistributedSampler
from .global_batch import BatchShare, GlobalBatchSampler
from .labelled import labelled, open_labelled
from .loader import DataLoader
from .mnist_idx import mnist
from .node import shared_on_node
from .partition import DataPartitioner, Partition
from .permutation import randperm
from .prototypes import synthetic
from .sampler import BatchSampler, RandomSampler, SequentialSampler
from .text import ByteWindows, text
from .uci_digits import digits

__all__ = [
    "ArrayDataset",
    "BatchDataset",
    "BatchSampler",
    "BatchShare",
    "ByteWindows",
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
    "labelled",
    "mnist",
    "open_labelled",
    "random_split",
    "randperm",
    "shared_on_node",
    "synthetic",
    "text",
]
