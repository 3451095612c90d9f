"""Data sets, samplers and the loader. Only `shared_on_node` communicates."""

from .builtin import ByteWindows, digits, mnist, synthetic, text
from .dataset import (
    ArrayDataset,
    BatchDataset,
    DataPartitioner,
    Dataset,
    Partition,
    Subset,
    default_collate,
    random_split,
)
from .distributed_samplers import BatchShare, DistributedSampler, GlobalBatchSampler
from .files import labelled, open_labelled
from .loader import DataLoader
from .node import shared_on_node
from .permutation import randperm
from .samplers import BatchSampler, RandomSampler, SequentialSampler

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
