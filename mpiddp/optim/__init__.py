"""Optimizers and learning-rate schedules, with torch's names and arithmetic.

An optimizer changes anything that has ``data`` and ``grad``, and does not communicate. These parameters mean the same
in all optimizers that have them:

- ``params`` : iterable of Parameter, or of groups with options of their own, ``{"params": [...], "lr": 0.1}``.
- ``lr`` : The learning rate.
- ``weight_decay`` : The parameter times this factor is added to the gradient, except in `AdamW`.
- ``eps`` : A small number that is added to the denominator of an update.

The constructors raise ValueError if one of these numbers, or SGD's ``momentum``, is negative, infinite or NaN.
"""

from mpiddp import moved

from . import lr_scheduler
from .adam import Adam, AdamW
from .optimizer import Optimizer
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "lr_scheduler"]

moved.explain(__name__)
