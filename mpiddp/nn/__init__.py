"""Modules, layers and losses under torch's names, on the tape of :mod:`mpiddp.autograd`.

Imports ``autograd`` and what is below it, and knows nothing of MPI: gradients leave through ``grad_slot`` and hooks.
"""

from . import functional, init, random
from .activation import LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from .container import Flatten, Identity, ModuleList, Sequential
from .conv import Conv2d
from .dropout import Dropout, Dropout2d
from .linear import Linear
from .loss import CrossEntropyLoss, MSELoss, NLLLoss
from .module import Module
from .parameter import Parameter
from .pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from .random import manual_seed

__all__ = [
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout2d",
    "Flatten",
    "Identity",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleList",
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
]
