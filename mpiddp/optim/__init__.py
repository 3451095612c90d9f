"""Optimizers and learning-rate schedules, in torch's words and arithmetic.

They change anything with ``data`` and ``grad``, and know neither MPI nor autograd. They share:

- ``params`` : iterable of Parameter, or of groups with options of their own, ``{"params": [...], "lr": 0.1}``.
- ``lr`` : learning rate.
- ``weight_decay`` : times the parameter, added to the gradient.
- ``eps`` : added to the denominator.

An option out of range raises ValueError.
"""

from mpiddp import moved

from . import lr_scheduler
from .adam import Adam, AdamW
from .optimizer import Optimizer
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "lr_scheduler"]

moved.explain(__name__)
