"""Training as a job: configuration, models, metrics, checkpoints, and a `Trainer` for any model.

Names are loaded on first use: `Config` is read before NumPy, because BLAS reads its number of threads then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpiddp import moved

if TYPE_CHECKING:
    from .checkpoint import save_model as save_model
    from .config import Config as Config, UsageError as UsageError
    from .metrics import EpochMetrics as EpochMetrics
    from .models import MLP as MLP, Net as Net, ResNet as ResNet
    from .trainer import Trainer as Trainer

_MODULES = {
    **dict.fromkeys(("MLP", "Net", "ResNet"), "models"),
    **dict.fromkeys(("Config", "UsageError"), "config"),
    "EpochMetrics": "metrics",
    "Trainer": "trainer",
    "save_model": "checkpoint",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in ("info", "run"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise moved.missing(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
