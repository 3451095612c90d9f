"""Functions of models under torch's names, on tensors and arrays; each lies beside its layer."""

from mpiddp import moved
from mpiddp.autograd import cat, stack

from .activation import log_softmax, relu, sigmoid, softmax, tanh
from .collectives import all_gather, all_reduce
from .conv import conv2d
from .dropout import dropout, dropout2d
from .linear import linear
from .loss import cross_entropy, mse_loss, nll_loss
from .normalization import batch_norm
from .pooling import max_pool2d

__all__ = [
    "all_gather",
    "all_reduce",
    "batch_norm",
    "cat",
    "conv2d",
    "cross_entropy",
    "dropout",
    "dropout2d",
    "linear",
    "log_softmax",
    "max_pool2d",
    "mse_loss",
    "nll_loss",
    "relu",
    "sigmoid",
    "softmax",
    "stack",
    "tanh",
]

moved.explain(__name__)
