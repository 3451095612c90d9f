"""Functions that models are written in, with torch's names and argument order, on tensors and plain arrays alike.

Imports ``autograd`` and ``nn.random``; one noun a file.
"""

from .activation import log_softmax, relu, sigmoid, softmax, tanh
from .attention import scaled_dot_product_attention
from .conv import conv2d
from .dropout import dropout, dropout2d
from .embedding import embedding
from .gelu import gelu
from .linear import linear
from .loss import cross_entropy, mse_loss, nll_loss
from .normalization import batch_norm, layer_norm
from .pooling import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from .shaping import cat, pad, stack

__all__ = [
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "batch_norm",
    "cat",
    "conv2d",
    "cross_entropy",
    "dropout",
    "dropout2d",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "log_softmax",
    "max_pool2d",
    "mse_loss",
    "nll_loss",
    "pad",
    "relu",
    "scaled_dot_product_attention",
    "sigmoid",
    "softmax",
    "stack",
    "tanh",
]
