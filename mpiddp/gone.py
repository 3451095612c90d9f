"""Public names that left, and what to use instead.

Each package that lost a name ends with ``def __getattr__(name)``, which raises what `missing` returns.
"""

from __future__ import annotations

import opcode
import sys

_DILOCO = "it is gone: use DiLoCo(params, period, lr=1, momentum=0), which averages parameters"
_WARM_UP = (
    "it is gone: use DiLoCo(params, period, warmup_steps=N); leave DistributedDataParallel by no_sync() after N steps"
)
_ADAM = "it is gone: use Adam or AdamW, or a subclass of Optimizer with an _update of your own"
GONE = {
    "_coalescing_manager": "it is gone: use all_reduce_coalesced or all_gather_coalesced with the list of arrays",
    "Adadelta": _ADAM,
    "Adagrad": _ADAM,
    "avg_pool2d": "it is gone: use adaptive_avg_pool2d, or conv2d with equal weights",
    "AvgPool2d": "it is gone: use AdaptiveAvgPool2d, or conv2d with equal weights",
    "clip_grad_value_": "it is gone: use clip_grad_norm_, or numpy.clip of each p.grad",
    "conv1d": "it is gone: use conv2d of images of one row",
    "Conv1d": "it is gone: use Conv2d on images of one row",
    "ExponentialLR": "it is gone: use LambdaLR(optimizer, lambda step: gamma**step)",
    "group_norm": "it is gone: use layer_norm of the groups' channels, reshaped",
    "GroupNorm": "it is gone: use LayerNorm of the groups' channels, reshaped",
    "HierarchicalModelAverager": _DILOCO,
    "l1_loss": "it is gone: use (input - target).abs().mean()",
    "L1Loss": "it is gone: use (input - target).abs().mean()",
    "leaky_relu": "it is gone: use F.relu, or where(x > 0, x, slope * x) of mpiddp.autograd",
    "LeakyReLU": "it is gone: use ReLU, or where(x > 0, x, slope * x) of mpiddp.autograd",
    "ModelAverager": _DILOCO,
    "OneCycleLR": "it is gone: use SequentialLR of a LinearLR and a CosineAnnealingLR, or LambdaLR",
    "parameters_to_vector": "it is gone: use numpy.concatenate of each p.data.ravel()",
    "PeriodicModelAverager": _DILOCO,
    "post_localSGD_hook": _WARM_UP,
    "PostLocalSGDOptimizer": _DILOCO,
    "PostLocalSGDState": _WARM_UP,
    "RMSprop": _ADAM,
    "smooth_l1_loss": "it is gone: use mse_loss, or the formula on tensors",
    "SmoothL1Loss": "it is gone: use MSELoss, or the formula on tensors",
    "vector_to_parameters": "it is gone: use p.data[...] of each parameter",
}


def missing(module: str, name: str) -> AttributeError | ImportError:
    """Return the error of a module that has no ``name``: an ImportError where ``from module import name`` asks.

    Python drops the text of an AttributeError there.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name not in GONE:
        return AttributeError(text, name=name)
    text += f": {GONE[name]}"
    asks = sys._getframe(2)
    if asks.f_code.co_code[asks.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(text, name=name)
    return AttributeError(text, name=name)
