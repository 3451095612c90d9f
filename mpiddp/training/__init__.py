"""Training as a job: configuration, models, metrics, checkpoints, and a `Trainer` for any model.

Names are loaded on first use: `Config` is read before NumPy, because BLAS reads its number of threads then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import save_model
    from .config import Config, UsageError
    from .metrics import EpochMetrics
    from .models import MLP, Net, ResNet, Transformer
    from .train_step import NaiveAveraging
    from .trainer import Trainer

__all__ = [
    "MLP",
    "Config",
    "EpochMetrics",
    "NaiveAveraging",
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
    "NaiveAveraging": "train_step",
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
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
