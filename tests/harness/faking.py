"""The fake device: a package named cupy in the place of the real one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fake_gpu"
"""For the head of PYTHONPATH."""


def _modules() -> list[str]:
    return [name for name in sys.modules if name == "cupy" or name.startswith(("cupy.", "cupyx", "cupy_backends"))]


@contextmanager
def fake_gpu() -> Iterator[Any]:
    """Let ``import cupy`` be the fake, fresh each time; its arrays do not outlive the context.

    Streams and events do their work late; see ``fake_gpu/cupy/_late.py``.
    """
    device = importlib.import_module("mpiddp.device")
    before = {name: sys.modules.pop(name) for name in _modules()}
    sys.path.insert(0, str(FOLDER))
    try:
        cupy = importlib.import_module("cupy")
        device.forget()
        yield cupy
        cupy.cuda.runtime.deviceSynchronize()
    finally:
        device.forget()
        sys.path.remove(str(FOLDER))
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(before)
