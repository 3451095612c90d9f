"""Functions that models are written in, with torch's names and argument order, on tensors and plain arrays alike.

Imports ``autograd`` and ``nn.random``; one noun a file.
"""

from .activation import log_softmax, relu, sigmoid, softmax, tanh
from .conv import conv2d
from .dropout import dropout, dropout2d
from .linear import linear
from .loss import cross_entropy, mse_loss, nll_loss
from .pooling import adaptive_avg_pool2d, avg_pool2d, max_pool2d

__all__ = [
    "adaptive_avg_pool2d",
    "avg_pool2d",
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
    "tanh",
]
