"""Data sets, samplers, the loader and the stream; only `shared_on_node` and `Stream` communicate.

They share: ``seed`` and ``shuffle`` are the same on every rank, and give the same order; ``num_replicas`` and ``rank``
are the world's by default; ``drop_last`` leaves out a last batch that is not full; samplers use only a data set's
length.
"""

from mpiddp import moved

from .builtin import digits, mnist, synthetic
from .dataset import (
    ArrayDataset,
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
from .stream import Stream, get_include

__all__ = [
    "ArrayDataset",
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
    "Stream",
    "Subset",
    "default_collate",
    "digits",
    "get_include",
    "labelled",
    "mnist",
    "open_labelled",
    "random_split",
    "randperm",
    "shared_on_node",
    "synthetic",
]

moved.explain(__name__)
