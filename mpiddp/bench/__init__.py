"""Benchmarks of mpiddp beside plain MPI, one copy of the bytes, and Gloo: ``python -m mpiddp bench`` and ``plot``.

Modules are imported on first use; `cli` needs no NumPy.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    return importlib.import_module(name)
