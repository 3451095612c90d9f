"""Optimizers and learning-rate schedules, in torch's words and arithmetic.

They change anything with ``data`` and ``grad``, and know neither MPI nor autograd.
"""

from . import lr_scheduler
from .adagrad import Adadelta, Adagrad
from .adam import Adam, AdamW
from .optimizer import Optimizer
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop", "lr_scheduler"]
