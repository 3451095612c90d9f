"""Functions of models under torch's names, on tensors and arrays; each lies beside its layer."""

from mpiddp import moved
from mpiddp.autograd import cat, stack

from .activation import gelu, log_softmax, relu, sigmoid, softmax, tanh
from .attention import scaled_dot_product_attention
from .collectives import all_gather, all_reduce, all_to_all_single, reduce_scatter
from .conv import conv2d
from .dropout import dropout, dropout2d
from .embedding import embedding
from .linear import linear
from .loss import cross_entropy, mse_loss, nll_loss
from .normalization import batch_norm, layer_norm
from .pooling import adaptive_avg_pool2d, max_pool2d

__all__ = [
    "adaptive_avg_pool2d",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
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
    "reduce_scatter",
    "relu",
    "scaled_dot_product_attention",
    "sigmoid",
    "softmax",
    "stack",
    "tanh",
]

moved.explain(__name__)
