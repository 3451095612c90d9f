"""Learning-rate schedules, in torch's words.

Every schedule here is a closed formula of the number of steps made, so it can be resumed or asked about any step;
torch's recursions give the same values up to rounding. Imports ``optimizer``.
"""

from .formulas import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, MultiStepLR, StepLR
from .one_cycle import OneCycleLR
from .scheduler import LRScheduler
from .sequential import SequentialLR

__all__ = [
    "CosineAnnealingLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "SequentialLR",
    "StepLR",
]
