"""Public names that left, and what to use instead.

Each package that lost a name ends with ``def __getattr__(name)``, which raises what `missing` returns.
"""

from __future__ import annotations

import opcode
import sys

_DILOCO = "DiLoCo(params, period, lr=1, momentum=0), which averages parameters; call it after each optimizer.step()"
_WARM_UP = "DiLoCo(params, period, warmup_steps=N); leave DistributedDataParallel by no_sync() after N steps"
_ADAM = "Adam or AdamW, or a subclass of Optimizer with an _update of your own"
GONE = {
    "Adadelta": _ADAM,
    "Adagrad": _ADAM,
    "ExponentialLR": "LambdaLR(optimizer, lambda step: gamma**step)",
    "OneCycleLR": "SequentialLR of a LinearLR and a CosineAnnealingLR, or LambdaLR",
    "RMSprop": _ADAM,
    "_coalescing_manager": "call all_reduce_coalesced or all_gather_coalesced with the list of arrays",
    "HierarchicalModelAverager": _DILOCO,
    "ModelAverager": _DILOCO,
    "PeriodicModelAverager": _DILOCO,
    "PostLocalSGDOptimizer": _DILOCO,
    "PostLocalSGDState": _WARM_UP,
    "post_localSGD_hook": _WARM_UP,
}


def missing(module: str, name: str) -> AttributeError | ImportError:
    """Return the error of a module that has no ``name``: an ImportError where ``from module import name`` asks.

    Python drops the text of an AttributeError there.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name not in GONE:
        return AttributeError(text, name=name)
    text += f", which left mpiddp: {GONE[name]}"
    asks = sys._getframe(2)
    if asks.f_code.co_code[asks.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(text, name=name)
    return AttributeError(text, name=name)
