"""Modules, layers and losses under torch's names, on the tape of :mod:`mpiddp.autograd`.

Imports ``autograd`` and what is below it, and knows nothing of MPI: gradients leave through ``grad_slot`` and hooks.
"""

from . import functional, init, random, utils
from .activation import GELU, LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from .attention import MultiheadAttention
from .container import Flatten, Identity, ModuleList, Sequential
from .conv import Conv2d
from .dropout import Dropout, Dropout2d
from .embedding import Embedding
from .linear import Linear
from .loss import CrossEntropyLoss, MSELoss, NLLLoss
from .module import Module
from .normalization import BatchNorm1d, BatchNorm2d, LayerNorm
from .parameter import Parameter
from .pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from .precision import GradScaler, MixedPrecision
from .random import manual_seed

__all__ = [
    "GELU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout2d",
    "Embedding",
    "Flatten",
    "GradScaler",
    "Identity",
    "LayerNorm",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "MixedPrecision",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "NLLLoss",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "functional",
    "init",
    "manual_seed",
    "random",
    "utils",
]
