"""Names that are elsewhere, or are gone: what to use instead.

A public module calls ``moved.explain(__name__)``. When one of its names leaves or moves, add a row to `_INSTEAD`, and
take it out one release later.
"""

from __future__ import annotations

import sys
from opcode import opmap
from types import ModuleType
from typing import NoReturn

_NO_STORE = "mpiddp needs no store, since ranks come from MPI"
_TORCHS = "it is not in mpiddp; torch's own runs on MPI with the backend of mpiddp.torch"
_NO_MIXED_PRECISION = (
    "there is no mixed precision any more: train in float32, and send gradients in half precision with"
    " mpiddp.fp16_compress_hook or bf16_compress_hook; or take torch's own, on the backend of mpiddp.torch"
)
_DILOCO = "it is gone: use DiLoCo(params, period, lr=1, momentum=0), which averages parameters"
_WARM_UP = (
    "it is gone: use DiLoCo(params, period, warmup_steps=N); leave DistributedDataParallel by no_sync() after N steps"
)
_WRAPPER = "it is gone: use fp16_compress_hook, bf16_compress_hook or powerSGD_hook alone, or a hook of your own"
_NO_BUFFER_HOOK = (
    "there are no hooks on buffers any more: use DistributedDataParallel(forward_sync_buffers=False), and reduce"
    " model.buffers() between steps"
)
_ADAM = "it is gone: use Adam or AdamW, or a subclass of Optimizer with an _update of your own"
_TORCH_MODEL = "it is gone: take a model of torch, on the backend of mpiddp.torch"
_NO_MESSAGE = "it is gone: use mpiddp.send and mpiddp.recv, and send the gradient back, as the example model_parallel"
_INSTEAD = {
    "DDP": "use mpiddp.DistributedDataParallel",
    "cuda": "use mpiddp.device, such as mpiddp.device.device_count()",
    "no_grad": "use mpiddp.autograd.no_grad",
    "tensor": "arrays are NumPy's or CuPy's; a tensor with a gradient is mpiddp.autograd.Tensor(array)",
    "Tensor": "use mpiddp.autograd.Tensor",
    "utils": "torch.utils.data's names are in mpiddp.data",
    "data.TensorDataset": "use mpiddp.data.ArrayDataset",
    "data.distributed": "use mpiddp.data.DistributedSampler",
    "distributed.FileStore": _NO_STORE,
    "distributed.HashStore": _NO_STORE,
    "distributed.Store": _NO_STORE,
    "distributed.TCPStore": _NO_STORE,
    "distributed.algorithms": "use mpiddp.Join, and the hooks and DiLoCo of mpiddp.parallel",
    "distributed.checkpoint": _TORCHS,
    "distributed.fsdp": _TORCHS,
    "distributed.get_local_rank": "use get_node_local_rank",
    "distributed.nn": "use mpiddp.nn.functional, whose collectives have gradients",
    "distributed.optim": "use mpiddp.ZeroRedundancyOptimizer",
    "distributed.pipelining": _TORCHS,
    "distributed.reduce_op": "use ReduceOp, such as ReduceOp.SUM",
    "distributed.rpc": _TORCHS,
    "distributed.tensor": _TORCHS,
    "nn.functional.all_to_all": "it is gone: use all_to_all_single of the blocks, joined",
    "nn.functional.broadcast": "it is gone: use all_gather(tensor)[src]",
    "nn.functional.gather": "it is gone: use all_gather, on every rank",
    "nn.functional.recv": _NO_MESSAGE,
    "nn.functional.reduce": "it is gone: use all_reduce, on every rank",
    "nn.functional.scatter": "it is gone: use reduce_scatter of zeros on all ranks but the source",
    "nn.functional.send": _NO_MESSAGE,
    "nn.parallel": "use mpiddp.DistributedDataParallel or mpiddp.DataParallel",
    "adaptive_avg_pool2d": "it is gone: use x.mean((2, 3)) for one window, or max_pool2d",
    "AdaptiveAvgPool2d": "it is gone: use x.mean((2, 3)) for one window, or MaxPool2d",
    "Adadelta": _ADAM,
    "Adagrad": _ADAM,
    "all_gather_coalesced": "it is gone, as torch deprecates it: use all_gather of each array, with async_op",
    "avg_pool2d": "it is gone: use conv2d with equal weights",
    "AvgPool2d": "it is gone: use conv2d with equal weights",
    "clip_grad_value_": "it is gone: use clip_grad_norm_, or numpy.clip of each p.grad",
    "BatchDataset": "it is gone: a data set with a method batch(indices) needs no class",
    "batched_powerSGD_hook": "it is gone: use powerSGD_hook",
    "bf16_compress_wrapper": _WRAPPER,
    "BufferCommHookLocation": _NO_BUFFER_HOOK,
    "BCEWithLogitsLoss": "it is gone: use CrossEntropyLoss with two classes, or the formula on tensors",
    "binary_cross_entropy_with_logits": "it is gone: use cross_entropy with two classes, or the formula on tensors",
    "ByteWindows": "it is gone: use a data set of your own, with __len__ and __getitem__",
    "_coalescing_manager": "it is gone: use all_reduce_coalesced with the list of arrays",
    "conv1d": "it is gone: use conv2d of images of one row",
    "Conv1d": "it is gone: use Conv2d on images of one row",
    "Embedding": _TORCH_MODEL,
    "embedding": "it is gone: use weight[indices]",
    "ExponentialLR": "it is gone: use LambdaLR(optimizer, lambda step: gamma**step)",
    "fp16_compress_wrapper": _WRAPPER,
    "GELU": "it is gone: use ReLU, or 0.5 * x * (1 + (0.7978846 * (x + 0.044715 * x**3)).tanh())",
    "gelu": "it is gone: use relu, or 0.5 * x * (1 + (0.7978846 * (x + 0.044715 * x**3)).tanh())",
    "GradScaler": _NO_MIXED_PRECISION,
    "group_norm": "it is gone: use batch_norm, or mean and var of a reshaped tensor",
    "GroupNorm": "it is gone: use BatchNorm2d, or mean and var of a reshaped tensor",
    "HierarchicalModelAverager": _DILOCO,
    "l1_loss": "it is gone: use (input - target).abs().mean()",
    "L1Loss": "it is gone: use (input - target).abs().mean()",
    "layer_norm": "it is gone: use (x - x.mean(-1, True)) / (x.var(-1, False, True) + eps).sqrt()",
    "LayerNorm": "it is gone: use BatchNorm1d, or (x - x.mean(-1, True)) / (x.var(-1, False, True) + eps).sqrt()",
    "leaky_relu": "it is gone: use F.relu, or where(x > 0, x, slope * x) of mpiddp.autograd",
    "LeakyReLU": "it is gone: use ReLU, or where(x > 0, x, slope * x) of mpiddp.autograd",
    "logsigmoid": "it is gone: use log_softmax of (x, 0), or the formula on tensors",
    "LossScale": _NO_MIXED_PRECISION,
    "MixedPrecision": _NO_MIXED_PRECISION,
    "ModelAverager": _DILOCO,
    "OneCycleLR": "it is gone: use SequentialLR of a LinearLR and a CosineAnnealingLR, or LambdaLR",
    "ModuleDict": "it is gone: use setattr(model, name, module), or ModuleList",
    "MultiheadAttention": _TORCH_MODEL,
    "NaiveAveraging": "it is gone: use DistributedDataParallel, or mpiddp.average_gradients(model) after backward",
    "pad": "it is gone: use numpy.pad of an input, or cat with zeros",
    "parameters_to_vector": "it is gone: use numpy.concatenate of each p.data.ravel()",
    "PeriodicModelAverager": _DILOCO,
    "post_localSGD_hook": _WARM_UP,
    "PostLocalSGDOptimizer": _DILOCO,
    "PostLocalSGDState": _WARM_UP,
    "RMSprop": _ADAM,
    "scaled_dot_product_attention": "it is gone: use (q @ k.transpose(-2, -1) * scale).softmax(-1) @ v",
    "silu": "it is gone: use x * x.sigmoid()",
    "SiLU": "it is gone: use x * x.sigmoid()",
    "data.text": "it is gone: use a data set of your own, with __len__ and __getitem__",
    "Transformer": _TORCH_MODEL,
    "smooth_l1_loss": "it is gone: use mse_loss, or the formula on tensors",
    "SmoothL1Loss": "it is gone: use MSELoss, or the formula on tensors",
    "vector_to_parameters": "it is gone: use p.data[...] of each parameter",
}
"""A name, under its package without "mpiddp.", or of any package; and what to do."""

at_the_top: set[str] = set()
"""Names of `mpiddp` itself, for those who ask a package for them."""


def explain(module: str, *parts: str) -> None:
    """Give a module the ``__getattr__`` that says where a name is.

    It is set at run time, because mypy would take any name for an attribute of a module that defines it.
    A package without ``__all__`` gets it: its names that are no modules, as of ``from .part import name as name``, and
    the modules ``parts``.
    """

    def getattr_of_module(name: str) -> NoReturn:
        raise missing(module, name)

    names = vars(sys.modules[module])
    if "__path__" in names:
        public = [name for name, each in names.items() if name[0] != "_" and not isinstance(each, ModuleType)]
        names.setdefault("__all__", [*public, *parts])
    names["__getattr__"] = getattr_of_module


def missing(module: str, name: str, also: str = "") -> AttributeError | ImportError:
    """Return the error for a name that ``module`` does not have; ``also`` is a package whose names it has, too."""
    rows = f"{module.partition('.')[2]}.{name}", f"{also}.{name}", name
    cure = next((_INSTEAD[row] for row in rows if row in _INSTEAD), f"use mpiddp.{name}" if name in at_the_top else "")
    text = f"module {module!r} has no attribute {name!r}" + (f": {cure}" if cure else "")
    frame = sys._getframe(2)
    if cure and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(text)  # `from ... import` would replace the text of an AttributeError
    return AttributeError(text, name=name, obj=sys.modules[module])


class _Modules:
    """The last finder of modules, asked for those that no other has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, row = name.partition(".")
        if package == "mpiddp" and row in _INSTEAD:
            raise ModuleNotFoundError(f"No module named {name!r}: {_INSTEAD[row]}", name=name)


sys.meta_path.append(_Modules)
