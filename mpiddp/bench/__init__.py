"""Benchmarks: what mpiddp's operations cost, beside plain MPI, one copy of the bytes, and Gloo.

``python -m mpiddp bench`` and ``plot``. May import everything; imported by nobody but the command line, which reads
`cli` and `sizes` before NumPy may be imported. It is the one package that may compare with torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Import a module when it is wanted: a part of this package, or a library that only one part needs."""
    return importlib.import_module(name)
