"""Data sets, samplers, the loader and the stream; only `shared_on_node` and `Stream` communicate.

These arguments mean the same wherever a docstring does not describe them. ``seed`` and ``shuffle`` of a distributed
sampler are equal on all ranks, and so is the order of samples. ``num_replicas`` and ``rank`` are the world's by
default. ``drop_last`` leaves out a last batch that is not full. Samplers use only the length of a data set.
"""

from mpiddp import moved

from .builtin import digits as digits, mnist as mnist, synthetic as synthetic
from .dataset import (
    ArrayDataset as ArrayDataset,
    DataPartitioner as DataPartitioner,
    Dataset as Dataset,
    Partition as Partition,
    Subset as Subset,
    default_collate as default_collate,
    random_split as random_split,
)
from .files import labelled as labelled, open_labelled as open_labelled
from .loader import DataLoader as DataLoader
from .node import shared_on_node as shared_on_node
from .permutation import randperm as randperm
from .samplers import (
    BatchSampler as BatchSampler,
    BatchShare as BatchShare,
    DistributedSampler as DistributedSampler,
    GlobalBatchSampler as GlobalBatchSampler,
    RandomSampler as RandomSampler,
)
from .stream import Stream as Stream, get_include as get_include

moved.explain(__name__)
