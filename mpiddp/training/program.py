"""The main job, ``python -m mpiddp train``: from a `Config` to a trained model."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mpiddp.distributed as dist
from mpiddp import nn
from mpiddp.data import ArrayDataset, DataLoader, DistributedSampler, GlobalBatchSampler, digits, mnist, synthetic
from mpiddp.data.mnist_idx import download_mnist
from mpiddp.device import cuda_fault
from mpiddp.device.host_memory import tune_allocator
from mpiddp.errors import EXIT_CHECKPOINTED
from mpiddp.mpi import runtime
from mpiddp.nn import functional as F  # noqa: N812 (its customary name)
from mpiddp.optim import SGD
from mpiddp.parallel import DistributedDataParallel, Timeline

from . import environment
from .averaging import AveragedModel, NaiveAveraging
from .checkpoint import save_model
from .config import Config, RunError, UsageError
from .keeper import Keeper
from .models import MODELS
from .outputs import Outputs
from .rank_log import RankLog
from .report import Console, configuration_lines
from .signals import StopRequest
from .together import together
from .trainer import Callback, Trainer

TEST_BATCH = 256
"""Samples that a rank evaluates at once."""

EXIT_INTERRUPTED = 130
"""As of a shell's command that Ctrl-C ended."""


def load_data(config: Config) -> tuple[ArrayDataset, ArrayDataset]:
    """Return the training and the test data that a configuration names."""
    if config.data == "mnist":
        assert config.data_dir is not None, "Config has checked it"
        return load_mnist(config.data_dir, config.download)
    if config.data == "synthetic":
        return synthetic(4096, seed=config.seed, noise=2.0), synthetic(1024, seed=config.seed, train=False, noise=2.0)
    return digits(seed=config.seed), digits(train=False, seed=config.seed)


def load_mnist(folder: Path, download: bool) -> tuple[ArrayDataset, ArrayDataset]:
    """Return MNIST from a folder; where it is to be fetched, the first rank of each node does it for all."""
    if download:
        first = dist.get_node_local_rank() == 0
        together(lambda: download_mnist(folder) if first else None)
    try:
        return mnist(folder), mnist(folder, train=False)
    except FileNotFoundError as error:
        raise UsageError(f"{error}; here: --download") from error


def check_request(config: Config) -> None:
    """Refuse what these ranks cannot do."""
    ranks = dist.get_world_size()
    if config.batch_size < ranks:
        raise UsageError(
            f"--batch-size {config.batch_size} is that of all ranks together: give {ranks} or more, or start fewer"
        )
    if config.device == "cuda":
        raise UsageError(f"--device cuda: {cuda_fault() or 'this version trains on the host only; use --device cpu'}")


def build_model(config: Config) -> AveragedModel:
    """Return the model that a configuration names, equal on all ranks, with averaged gradients."""
    nn.manual_seed(config.seed)
    nn.random.set_stream(dist.get_rank())
    module = MODELS[config.model](dropout=config.dropout)
    return NaiveAveraging(module) if config.average == "naive" else DistributedDataParallel(module)


def build_trainer(
    config: Config,
    data: tuple[ArrayDataset, ArrayDataset],
    callbacks: Mapping[str, Sequence[Callback]] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Trainer:
    """Return a trainer that does what a configuration says; every rank calls it."""
    train, test = data
    sampler = GlobalBatchSampler(train, config.batch_size, seed=config.seed)
    test_sampler = DistributedSampler(test, shuffle=False, mode="exact")
    model = build_model(config)
    return Trainer(
        model,
        SGD(model.module.parameters(), lr=config.lr, momentum=config.momentum),
        F.nll_loss,
        DataLoader(train, batch_sampler=sampler),
        DataLoader(test, batch_size=TEST_BATCH, sampler=test_sampler),
        stop=stop,
        on_nan="skip" if config.on_nan == "skip" else "stop",
        callbacks=callbacks,
    )


def run(config: Config, version: str) -> int:
    """Train as a configuration says, and return the exit code. Starts MPI.

    Parameters
    ----------
    config : Config
        What to do.
    version : str
        Of mpiddp, for the description of the run.

    Raises
    ------
    UsageError
        On every rank, if it cannot be done; RunError, if it was begun.
    """
    tune_allocator()
    dist.init_process_group()
    world = runtime.start()
    first = world.rank == 0
    if first:
        print(configuration_lines(config, world.size, len(set(world.nodes))), flush=True)
    together(lambda: check_request(config))
    data = together(lambda: load_data(config))
    logs = config.output / "logs" if config.log_ranks and config.output else None
    log = together(lambda: RankLog(world.rank, world.size, logs))
    with log, StopRequest() as stop:
        trainer = build_trainer(config, data, stop=stop)
        keeper = Keeper(config, first) if config.output else None
        if keeper is not None:
            surroundings = environment.collect(version)
            keeper.resume(trainer)
            # Only now: a run that is refused leaves the folder's description as it was.
            together(lambda: keeper.prepare(surroundings))
        timeline = _watched(trainer, config.timeline) if config.timeline else None
        outputs = together(lambda: Outputs(config.metrics, config.output, trainer.history) if first else None)
        for event, callbacks in _callbacks(config, outputs, keeper, first).items():
            trainer.callbacks[event] += callbacks
        trainer.callbacks["epoch_end"].append(log.epoch_end)
        try:
            trainer.fit(config.epochs)
        except FloatingPointError as error:
            raise RunError(str(error)) from error
    if outputs is not None:
        outputs.close()
    code = _stop(stop, trainer, keeper) if trainer.stopped else _finish(config, trainer, keeper)
    if timeline is not None:
        summary = together(timeline.write, RunError)
        if first:
            print(f"{summary}\ntimeline written to {timeline.path}", flush=True)
    dist.destroy_process_group()
    return code


def _watched(trainer: Trainer, path: Path) -> Timeline:
    """Return a timeline on which the trainer's steps are noted from now on."""
    assert isinstance(trainer.model, DistributedDataParallel), "Config has checked it"
    timeline = Timeline(path)
    timeline.watch(trainer.optimizer)
    trainer.model.timeline = timeline
    return timeline


def _callbacks(
    config: Config, outputs: Outputs | None, keeper: Keeper | None, first: bool
) -> dict[str, list[Callback]]:
    """Return what is done besides training: say, write, save, in this order."""
    console = Console(config.epochs) if first else None
    return {
        "epoch_begin": [console.epoch_begin] if console else [],
        "step_end": [who.step_end for who in (console, keeper) if who],
        "epoch_end": [who.epoch_end for who in (console, outputs, keeper) if who],
    }


def _stop(stop: StopRequest, trainer: Trainer, keeper: Keeper | None) -> int:
    """Save a checkpoint after a signal, and return the exit code that asks for another start."""
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, stop.number)
    rank, number = next((rank, number) for rank, number in enumerate(numbers) if number)
    said = f"{signal.Signals(number).name} on rank {rank}: stopped after step {trainer.step}"
    if keeper is not None:
        keeper.save(trainer)
        together(keeper.finish, RunError)
    if dist.get_rank() == 0:
        saved = "saved a checkpoint; go on with --resume auto" if keeper else "nothing saved: no --output DIR"
        print(f"{said}, {saved}", flush=True)
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_CHECKPOINTED if keeper is not None else 128 + number


def _finish(config: Config, trainer: Trainer, keeper: Keeper | None) -> int:
    """Save the model, and say where and how good it is."""
    if keeper is not None:
        together(keeper.finish, RunError)
    first = dist.get_rank() == 0
    if config.output is not None:
        path = config.output / "model.safetensors"
        together(lambda: save_model(path, trainer.model.module) if first else None, RunError)
    if first:
        print(f"saved {path}" if config.output else "no --output DIR, so the model is not saved", flush=True)
    return 0
