"""The fake device: a package named cupy in the place of the real one."""

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


def forget() -> None:
    """Let mpiddp forget all about devices."""
    choice, stream, pinned, nccl = (
        importlib.import_module(f"mpiddp.device.{name}") for name in ("choice", "stream", "pinned", "nccl")
    )
    choice._index = None
    for cache in (choice.cuda_fault, nccl.fault):
        cache.cache_clear()
    for kept in (stream._sides, pinned._free, pinned._lent):
        kept.clear()


@contextmanager
def fake_gpu() -> Iterator[Any]:
    """Let ``import cupy`` be the fake, fresh each time; its arrays do not outlive the context.

    Streams and events do their work late; see ``fake_gpu/cupy/_late.py``.
    """
    before = {name: sys.modules.pop(name) for name in _modules()}
    sys.path.insert(0, str(FOLDER))
    try:
        cupy = importlib.import_module("cupy")
        forget()
        yield cupy
        cupy.cuda.runtime.deviceSynchronize()
    finally:
        forget()
        sys.path.remove(str(FOLDER))
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(before)
