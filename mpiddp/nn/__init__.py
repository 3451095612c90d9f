"""Modules, layers and losses under torch's names, on the tape of :mod:`mpiddp.autograd`.

Only `collectives` communicates. DistributedDataParallel reaches gradients through the ``grad_slot`` and the hooks of a
parameter. A layer has the options of its function in `functional`. Functions and layers share these parameters:

- ``input``, ``weight``, ``bias`` of functions : array or Tensor. Shapes that do not fit raise RuntimeError or
  ValueError. An input of another dtype than the weights raises RuntimeError. Compute in float32 or float64, because
  sums of half precision are coarse.
- ``bias`` of layers : bool. Learn a bias.
- ``dtype`` : The dtype of a layer's parameters, float32 by default.
- ``eps`` : A small number that is added to a variance.
- ``reduction`` : {'mean', 'sum', 'none'}.
- ``inplace``, ``non_blocking`` : ignored.
"""

from mpiddp import moved

from . import functional as functional, init as init, random as random, utils as utils
from .activation import LogSoftmax as LogSoftmax, ReLU as ReLU, Sigmoid as Sigmoid, Softmax as Softmax, Tanh as Tanh
from .container import Identity as Identity, ModuleList as ModuleList, Sequential as Sequential
from .conv import Conv2d as Conv2d
from .dropout import Dropout as Dropout, Dropout2d as Dropout2d
from .linear import Linear as Linear
from .loss import CrossEntropyLoss as CrossEntropyLoss, MSELoss as MSELoss, NLLLoss as NLLLoss
from .module import Module as Module
from .normalization import BatchNorm1d as BatchNorm1d, BatchNorm2d as BatchNorm2d
from .parameter import Parameter as Parameter
from .pooling import MaxPool2d as MaxPool2d
from .random import manual_seed as manual_seed
from .shaping import Flatten as Flatten

moved.explain(__name__, "functional", "init", "random", "utils")
