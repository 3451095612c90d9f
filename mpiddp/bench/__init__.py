"""Benchmarks: the cost of mpiddp's operations, beside plain MPI, one copy of the bytes, and Gloo.

``python -m mpiddp bench`` and ``plot``; one module a command. The command line reads `cli` before NumPy is imported.
This package may compare with torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Import a module on first use: a command of this package, or an optional library."""
    return importlib.import_module(name)
