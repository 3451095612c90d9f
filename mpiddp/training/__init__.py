"""Training as a job: configuration, models, metrics, checkpoints, and a `Trainer` for any model.

Names are loaded on first use: `Config` is read before NumPy, because BLAS reads its number of threads then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpiddp import moved

if TYPE_CHECKING:
    from .checkpoint import save_model
    from .config import Config, UsageError
    from .metrics import EpochMetrics
    from .models import MLP, Net, ResNet, Transformer
    from .trainer import Trainer

__all__ = [
    "MLP",
    "Config",
    "EpochMetrics",
    "Net",
    "ResNet",
    "Trainer",
    "Transformer",
    "UsageError",
    "save_model",
]

_MODULES = {
    "Config": "config",
    "EpochMetrics": "metrics",
    "MLP": "models",
    "Net": "models",
    "ResNet": "models",
    "Trainer": "trainer",
    "Transformer": "models",
    "UsageError": "config",
    "save_model": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in ("info", "run"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise moved.missing(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
