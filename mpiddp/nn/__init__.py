"""Modules, layers and losses under torch's names, on the tape of :mod:`mpiddp.autograd`.

Only `collectives` knows MPI: gradients leave through ``grad_slot`` and hooks. A layer has the parameters of its
function in `functional`. They share:

- ``input``, ``weight``, ``bias`` of functions : array or Tensor. Shapes that do not fit, and an input of another dtype
  than the weights, raise RuntimeError. Compute in float32 or float64: sums of half precision are coarse.
- ``bias`` of layers : bool. Learn a bias.
- ``dtype`` : of a layer's parameters, float32 by default.
- ``eps`` : added to the variance.
- ``reduction`` : {'mean', 'sum', 'none'}.
- ``inplace``, ``non_blocking`` : ignored.
"""

from mpiddp import moved

from . import functional, init, random, utils
from .activation import LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from .container import Identity, ModuleList, Sequential
from .conv import Conv2d
from .dropout import Dropout, Dropout2d
from .linear import Linear
from .loss import CrossEntropyLoss, MSELoss, NLLLoss
from .module import Module
from .normalization import BatchNorm1d, BatchNorm2d
from .parameter import Parameter
from .pooling import MaxPool2d
from .random import manual_seed
from .shaping import Flatten

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
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
    "utils",
]

moved.explain(__name__)
