"""Make the objects of a `Config`: device, data, model, optimizer, schedule, and the `Trainer` that uses them."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import mpiddp.distributed as dist
from mpiddp import data, nn
from mpiddp.device import choice, upload
from mpiddp.errors import MismatchError
from mpiddp.nn.normalization import BatchNorm
from mpiddp.optim import SGD, Adam, AdamW, Optimizer
from mpiddp.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from mpiddp.parallel import DistributedDataParallel, PowerSGDState, SyncBatchNorm, ZeroRedundancyOptimizer

from .config import ALONE, Config
from .models import MODELS
from .options import UsageError, refusing
from .ranks import gathered, raise_on_all_ranks
from .trainer import Trainer
from .user_code import call

TEST_BATCH = 256

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}

Split = tuple[data.Dataset, data.Dataset]
"""Training data and test data."""


def load_data(config: Config) -> Split:
    """Return the training and test data that ``--data`` names.

    Each node holds one copy, unless a callable of the user's returns the data. Every rank raises UsageError if the data
    cannot be loaded, are empty, or have other lengths on another rank.
    """
    train, test = raise_on_all_ranks(lambda: _load(config))
    lengths = gathered((len(train), len(test)))
    wrong = next((rank for rank, found in enumerate(lengths) if found != lengths[0] or 0 in found), None)
    if wrong is not None:
        raise UsageError(
            f"--data {config.data} gave {lengths[0]} samples (for training and for the test) on rank 0, and"
            f" {lengths[wrong]} on rank {wrong}: it has to give all of them, at least one of each, on every rank, each"
            " of which takes its share"
        )
    return train, test


def _load(config: Config) -> Split:
    kind, _, place = config.data.partition(":")
    try:
        match kind:
            case "digits":
                return _shared(lambda train: data.digits(train, seed=config.seed))
            case "synthetic":
                return _shared(
                    lambda train: data.synthetic(4096 if train else 1024, seed=config.seed, train=train, noise=2)
                )
            case "mnist":
                # `Config` has checked that ``--data-dir`` is given.
                return _shared(functools.partial(data.mnist, config.data_dir or ""))
            case "npz":
                return data.labelled(data.shared_on_node(lambda: data.open_labelled(place)), config.seed)
        # The user's callable runs on every rank, so that it may use `shared_on_node`.
        train, test = (call("--data", config.data, data.Dataset, train=part) for part in (True, False))
        return train, test
    except (OSError, ValueError, MismatchError) as error:
        raise UsageError(" ".join([f"--data {config.data}: {error}", *getattr(error, "__notes__", ())])) from error


def _shared(make: Callable[[bool], data.ArrayDataset]) -> Split:
    arrays = data.shared_on_node(lambda: [*make(True).arrays, *make(False).arrays])
    return data.ArrayDataset(*arrays[:2]), data.ArrayDataset(*arrays[2:])


def build_module(config: Config) -> nn.Module:
    """Return the model. Layers of `mpiddp.nn` start equal on all ranks. All ranks call this together."""
    nn.manual_seed(config.seed)
    nn.random.set_stream(dist.get_rank())
    if config.model in MODELS:
        options: dict[str, Any] = {} if config.dropout is None else {"dropout": config.dropout}
        module = MODELS[config.model](**options)
    else:
        module = raise_on_all_ranks(lambda: _called(config.model))
    module = SyncBatchNorm.convert_sync_batchnorm(module) if config.sync_batchnorm else module
    if (
        config.spares
        and not config.virtual_ranks
        and any(isinstance(m, BatchNorm) and not isinstance(m, SyncBatchNorm) for m in module.modules())
    ):
        raise UsageError(
            "--spares: running statistics of batch norms are those of rank 0, and would die with it; give"
            " --sync-batchnorm, with which all ranks have them"
        )
    return module.convert(upload) if config.device == "cuda" else module


def _called(name: str) -> nn.Module:
    module: nn.Module = call("--model", name, nn.Module)
    if not any(p.requires_grad for p in module.parameters()):
        raise UsageError(f"--model {name} has no parameter to train: return a Module that has one")
    return module


def build_model(config: Config) -> DistributedDataParallel:
    """Return the model of ``--model``, in the wrapper of ``--average`` that averages its gradients over the ranks."""
    module = build_module(config)
    if config.average == "ddp":
        with refusing(f"--model {config.model}: ", ValueError):
            return DistributedDataParallel(module, virtual_ranks=config.virtual_ranks)
    wrap = functools.partial(call, "--average", config.average, DistributedDataParallel, module=module)
    found: DistributedDataParallel = raise_on_all_ranks(wrap)
    if found.module is not module:
        raise UsageError(f"--average {config.average} has to wrap the module that it is given, and wraps another one")
    if config.spares and isinstance(found.comm_hook_state, PowerSGDState):
        raise UsageError(f"--spares: with PowerSGD a rank's remainder of gradients {ALONE}")
    return found


def group_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the optimizer, such as ``lr``, from the values that `Config.as_dict` returned."""
    options = {"lr": config["lr"]}
    if config["optimizer"] not in OPTIMIZERS:
        return options
    options["weight_decay"] = config["weight_decay"]
    if config["optimizer"] == "sgd":
        return options | {"momentum": config["momentum"]}
    return options | {"betas": (config["momentum"], 0.999)}


def build_optimizer(config: Config, module: nn.Module) -> Optimizer:
    name, options = config.optimizer, group_options(config.as_dict())
    kind: Callable[..., Optimizer] = OPTIMIZERS.get(name) or (
        lambda params, lr: call("--optimizer", name, Optimizer, params=params, lr=lr)
    )
    if config.zero:
        return ZeroRedundancyOptimizer(module.parameters(), kind, **options)
    return kind(module.parameters(), **options)


def build_scheduler(config: Config, optimizer: Optimizer, steps_an_epoch: int) -> LRScheduler | None:
    """Return the schedule of the learning rate, counted in steps; None if the rate is constant."""
    parts: list[LRScheduler] = []
    warmup, steps = config.warmup_steps, config.epochs * steps_an_epoch
    if warmup:
        # With w warm-up steps the rates are lr / (w + 1), 2 lr / (w + 1), ..., and lr from step w on.
        parts.append(LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup))
    if config.schedule == "cosine":
        parts.append(CosineAnnealingLR(optimizer, max(1, steps - warmup)))
    elif config.schedule != "constant":
        given = {"optimizer": optimizer, "steps": steps - warmup, "steps_an_epoch": steps_an_epoch}
        parts.append(call("--schedule", config.schedule, LRScheduler, **given))
    if len(parts) < 2:
        return parts[0] if parts else None
    return SequentialLR(optimizer, parts, [warmup])


def build_trainer(
    config: Config,
    split: Split,
    stop: Callable[[], bool] = lambda: False,
) -> Trainer:
    train, test = split
    virtual = config.virtual_ranks
    with refusing("--batch-size, --virtual-ranks: ", ValueError):
        sampler = data.GlobalBatchSampler(train, config.batch_size, seed=config.seed, virtual_ranks=virtual)
    parts = virtual or dist.get_world_size()
    testing = data.GlobalBatchSampler(test, parts * TEST_BATCH, shuffle=False, virtual_ranks=virtual)
    device: Literal["cpu", "cuda"] = "cuda" if config.device == "cuda" else "cpu"
    model = build_model(config)
    optimizer = raise_on_all_ranks(lambda: build_optimizer(config, model.module))
    steps_an_epoch = -(-len(sampler) // (len(sampler.virtual_ranks) * config.accumulate))
    return Trainer(
        model,
        optimizer,
        data.DataLoader(train, batch_sampler=sampler, num_workers=config.workers, device=device),
        data.DataLoader(test, batch_sampler=testing, num_workers=config.workers, device=device),
        config,
        stop,
        raise_on_all_ranks(lambda: build_scheduler(config, optimizer, steps_an_epoch)),
    )


def agree_on_device(wanted: str, fault_here: str | None) -> bool:
    """Return True if all ranks put their arrays on GPUs. All ranks call this together.

    UsageError if the user requested GPUs and some rank cannot use one, for the reason in its ``fault_here``.
    """
    faults = gathered(fault_here)
    without = [rank for rank, text in enumerate(faults) if text is not None]
    if not without:
        choice.choose(dist.get_node_local_rank())  # not every launcher announces the local rank before MPI starts
        return True
    if wanted == "cuda":
        where = f" (on rank {without[0]})" if len(without) < len(faults) else ""
        raise UsageError(f"--device cuda: {faults[without[0]]}{where}")
    if len(without) < len(faults) and dist.get_rank() == 0:
        warnings.warn(f"training on the host, because rank {without[0]} has no GPU: {faults[without[0]]}", stacklevel=2)
    return False
