"""Optimizers and learning-rate schedules, in torch's words and arithmetic.

They change anything that has ``data`` and ``grad``. May import ``device`` and ``typing``; knows nothing of MPI nor of
autograd.
"""

from . import lr_scheduler
from .adam import Adam, AdamW
from .optimizer import Optimizer
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "lr_scheduler"]
