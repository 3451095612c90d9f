"""Functions of models under torch's names, on tensors and arrays; each lies beside its layer."""

from mpiddp import moved
from mpiddp.autograd import cat, stack

from .activation import gelu, leaky_relu, log_softmax, logsigmoid, relu, sigmoid, silu, softmax, tanh
from .attention import scaled_dot_product_attention
from .collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from .conv import conv1d, conv2d
from .dropout import dropout, dropout2d
from .embedding import embedding
from .linear import linear
from .loss import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from .normalization import batch_norm, group_norm, layer_norm
from .pooling import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from .shaping import pad

__all__ = [
    "adaptive_avg_pool2d",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "broadcast",
    "cat",
    "conv1d",
    "conv2d",
    "cross_entropy",
    "dropout",
    "dropout2d",
    "embedding",
    "gather",
    "gelu",
    "group_norm",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsigmoid",
    "max_pool2d",
    "mse_loss",
    "nll_loss",
    "pad",
    "recv",
    "reduce",
    "reduce_scatter",
    "relu",
    "scaled_dot_product_attention",
    "scatter",
    "send",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "stack",
    "tanh",
]

moved.explain(__name__)
