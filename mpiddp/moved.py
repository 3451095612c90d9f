"""Errors for names that have moved or are gone, which say what to use instead.

A public module calls ``moved.explain(__name__)``. When one of its names moves or leaves, add a row to `_ELSEWHERE` or
`_GONE`, and take the row out one release later.
"""

import sys
from opcode import opmap
from types import ModuleType
from typing import NoReturn

_ELSEWHERE = {
    "DDP": "use mpiddp.DistributedDataParallel",
    "cuda": "use mpiddp.device, such as mpiddp.device.device_count()",
    "no_grad": "use mpiddp.autograd.no_grad",
    "tensor": "arrays are NumPy's or CuPy's; a tensor with a gradient is mpiddp.autograd.Tensor(array)",
    "Tensor": "use mpiddp.autograd.Tensor",
    "utils": "torch.utils.data's names are in mpiddp.data",
    "data.TensorDataset": "use mpiddp.data.ArrayDataset",
    "data.distributed": "use mpiddp.data.DistributedSampler",
    "distributed.FileStore distributed.HashStore distributed.Store distributed.TCPStore": (
        "mpiddp needs no store, since ranks come from MPI"
    ),
    "distributed.checkpoint distributed.fsdp distributed.pipelining distributed.rpc distributed.tensor": (
        "it is not in mpiddp; torch's own runs on MPI with the backend of mpiddp.torch"
    ),
    "distributed.algorithms": "use mpiddp.Join, and the hooks and DiLoCo of mpiddp.parallel",
    "distributed.get_local_rank": "use get_node_local_rank",
    "distributed.nn": "use mpiddp.nn.functional, whose collectives have gradients",
    "distributed.optim": "use mpiddp.ZeroRedundancyOptimizer",
    "distributed.reduce_op": "use ReduceOp, such as ReduceOp.SUM",
    "nn.parallel": "use mpiddp.DistributedDataParallel or mpiddp.DataParallel",
    "GradScaler LossScale MixedPrecision": (
        "there is no mixed precision any more: train in float32, and send gradients in half precision with"
        " mpiddp.fp16_compress_hook or bf16_compress_hook; or take torch's own, on the backend of mpiddp.torch"
    ),
    "BufferCommHookLocation": (
        "there are no hooks on buffers any more: use DistributedDataParallel(forward_sync_buffers=False), and reduce"
        " model.buffers() between steps"
    ),
}
_GONE = {
    "nn.functional.broadcast": "use all_gather(tensor)[src]",
    "nn.functional.gather": "use all_gather, on every rank",
    "nn.functional.reduce": "use all_reduce, on every rank",
    "nn.functional.all_to_all nn.functional.all_to_all_single nn.functional.scatter": (
        "use all_gather on every rank, and take the parts of this one"
    ),
    "nn.functional.reduce_scatter": "use all_reduce, and take the part of this rank",
    "nn.functional.recv nn.functional.send": (
        "use mpiddp.send and mpiddp.recv, and send the gradient back, as the example model_parallel"
    ),
    "adaptive_avg_pool2d AdaptiveAvgPool2d": "use x.mean((2, 3)) for one window, or max_pool2d",
    "Adadelta Adagrad RMSprop": "use Adam or AdamW, or a subclass of Optimizer with an _update of your own",
    "all_gather_coalesced": "torch deprecates it: use all_gather of each array, with async_op",
    "avg_pool2d AvgPool2d": "use conv2d with equal weights",
    "batch_norm": "use BatchNorm1d or BatchNorm2d",
    "batched_powerSGD_hook": "use powerSGD_hook",
    "bf16_compress_wrapper fp16_compress_wrapper": (
        "use fp16_compress_hook, bf16_compress_hook or powerSGD_hook alone, or a hook of your own"
    ),
    "BatchDataset": "a data set with a method batch(indices) needs no class",
    "BCEWithLogitsLoss binary_cross_entropy_with_logits": (
        "use cross_entropy with two classes, or the formula on tensors"
    ),
    "ByteWindows data.text": "use a data set of your own, with __len__ and __getitem__",
    "calculate_gain kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_": (
        "use nn.init.uniform_ or normal_ with the bound or deviation, such as sqrt(6 / (fan_in + fan_out))"
    ),
    "clip_grad_value_": "use clip_grad_norm_, or numpy.clip of each p.grad",
    "_coalescing_manager": "use all_reduce_coalesced with the list of arrays",
    "constant_ ones_ zeros_": "use p.data[...] = 0.0, or another value",
    "conv1d Conv1d": "use conv2d, on images of one row",
    "embedding": "use weight[indices]",
    "ExponentialLR": "use LambdaLR(optimizer, lambda step: gamma**step)",
    "gelu GELU": "use relu, or 0.5 * x * (1 + (0.7978846 * (x + 0.044715 * x**3)).tanh())",
    "group_norm GroupNorm": "use BatchNorm2d, or mean and var of a reshaped tensor",
    "HierarchicalModelAverager ModelAverager PeriodicModelAverager PostLocalSGDOptimizer": (
        "use DiLoCo(params, period, lr=1, momentum=0), which averages parameters"
    ),
    "get_state set_state initial_seed": "set_step(number) makes dropout follow from seed, rank and number",
    "l1_loss L1Loss": "use (input - target).abs().mean()",
    "layer_norm LayerNorm": "use (x - x.mean(-1, True)) / (x.var(-1, False, True) + eps).sqrt()",
    "leaky_relu LeakyReLU": "use relu, or where(x > 0, x, slope * x) of mpiddp.autograd",
    "logsigmoid": "use log_softmax of (x, 0), or the formula on tensors",
    "maximum minimum": "use where(a > b, a, b) of mpiddp.autograd",
    "ModuleDict": "use setattr(model, name, module), or ModuleList",
    "MultiheadAttention Embedding Transformer": "take a model of torch, on the backend of mpiddp.torch",
    "NaiveAveraging": "use DistributedDataParallel, or mpiddp.average_gradients(model) after backward",
    "OneCycleLR": "use SequentialLR of a LinearLR and a CosineAnnealingLR, or LambdaLR",
    "pad": "use numpy.pad of an input, or cat with zeros",
    "parameters_to_vector": "use numpy.concatenate of each p.data.ravel()",
    "post_localSGD_hook PostLocalSGDState": (
        "use DiLoCo(params, period, warmup_steps=N); leave DistributedDataParallel by no_sync() after N steps"
    ),
    "scaled_dot_product_attention": "use (q @ k.transpose(-2, -1) * scale).softmax(-1) @ v",
    "SequentialSampler": "use range(len(data))",
    "silu SiLU": "use x * x.sigmoid()",
    "smooth_l1_loss SmoothL1Loss": "use mse_loss, or the formula on tensors",
    "Tensor.argmin Tensor.max Tensor.min": "use x.data.max(axis), or where of mpiddp.autograd for a gradient",
    "Tensor.copy_ Tensor.fill_ Tensor.zero_": "use x[...] = value",
    "Tensor.dim": "use x.ndim",
    "Tensor.eq": "use ==",
    "Tensor.float Tensor.long": "use x.astype('float32') or 'int64'",
    "Tensor.numel": "use x.size",
    "Tensor.t": "use x.T",
    "Tensor.view_as": "use x.reshape(other.shape)",
    "training.Config training.EpochMetrics training.MLP training.Net training.ResNet training.Trainer": (
        "it is a part of `python -m mpiddp train`; a loop of your own, as in README.md, needs none of them"
    ),
    "training.save_model": "use mpiddp.save(model.state_dict(), path)",
    "vector_to_parameters": "use p.data[...] of each parameter",
}

_INSTEAD = {name: cure for names, cure in _ELSEWHERE.items() for name in names.split()} | {
    name: f"it is gone: {cure}" for names, cure in _GONE.items() for name in names.split()
}
"""Advice by name. "data.text" counts for the package mpiddp.data only, and "Tensor.dim" for attributes of that class. A
name without a dot counts for any package."""

at_the_top: set[str] = set()
"""Names of `mpiddp` itself. If a program looks for one of them in a package, the error says where it is."""


def explain(module: str, *parts: str, gathers: bool = False) -> None:
    """Give a module a ``__getattr__`` that says where a name is, and ``__all__`` if it has none.

    ``__getattr__`` is set at run time. If a module defined it, mypy would take any name for an attribute of the module.
    ``__all__`` of a package has all its names that are no modules, such as those of ``from .part import name as name``,
    and the modules in ``parts``. The same holds for a module that ``gathers`` names of others. ``__all__`` of any other
    module has the names that it defines.
    """

    def getattr_of_module(name: str) -> NoReturn:
        raise missing(module, name)

    names = vars(sys.modules[module])
    gathers = gathers or "__path__" in names
    shown = {name: each for name, each in names.items() if name[0] != "_" and not isinstance(each, ModuleType)}
    public = [name for name, each in shown.items() if gathers or getattr(each, "__module__", "") == module]
    names.setdefault("__all__", [*public, *parts])
    names["__getattr__"] = getattr_of_module


def missing(module: str, name: str, also: str = "") -> AttributeError | ImportError:
    """Return the error for a name that ``module`` does not have.

    ``also`` is a package whose names ``module`` has as well, so advice for that package counts too.
    """
    rows = f"{module.partition('.')[2]}.{name}", f"{also}.{name}", name
    cure = next((_INSTEAD[row] for row in rows if row in _INSTEAD), f"use mpiddp.{name}" if name in at_the_top else "")
    text = f"module {module!r} has no attribute {name!r}" + (f": {cure}" if cure else "")
    frame = sys._getframe(2)
    if cure and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(text)  # `from ... import` would replace the text of an AttributeError
    return AttributeError(text, name=name, obj=sys.modules[module])


def explain_attributes(kind: type) -> None:
    """Give a class a ``__getattr__`` that says what to use instead of an attribute that is gone."""

    def getattr_of_instance(self: object, name: str) -> NoReturn:
        cure = _INSTEAD.get(f"{kind.__name__}.{name}")
        text = f"{type(self).__name__!r} object has no attribute {name!r}" + (f": {cure}" if cure else "")
        raise AttributeError(text, name=name, obj=self)

    kind.__getattr__ = getattr_of_instance  # type: ignore[attr-defined]


class _Modules:
    """The last finder of modules. Python asks it for modules that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, row = name.partition(".")
        if package == "mpiddp" and row in _INSTEAD:
            raise ModuleNotFoundError(f"No module named {name!r}: {_INSTEAD[row]}", name=name)


sys.meta_path.append(_Modules)
