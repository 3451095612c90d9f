"""Functions for models under torch's names, on tensors and arrays. Each is defined in the module of its layer."""

from mpiddp import moved
from mpiddp.autograd import cat as cat, stack as stack

from .activation import log_softmax as log_softmax, relu as relu, sigmoid as sigmoid, softmax as softmax, tanh as tanh
from .collectives import all_gather as all_gather, all_reduce as all_reduce
from .conv import conv2d as conv2d
from .dropout import dropout as dropout, dropout2d as dropout2d
from .linear import linear as linear
from .loss import cross_entropy as cross_entropy, mse_loss as mse_loss, nll_loss as nll_loss
from .pooling import max_pool2d as max_pool2d

moved.explain(__name__, gathers=True)
