"""The main job, ``python -m mpiddp train``: from a `Config` to a trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import mpiddp.distributed as dist
from mpiddp import nn
from mpiddp.data import ArrayDataset, DataLoader, DistributedSampler, GlobalBatchSampler, digits, mnist, synthetic
from mpiddp.data.mnist_idx import download_mnist
from mpiddp.device import cuda_fault
from mpiddp.device.host_memory import tune_allocator
from mpiddp.mpi import runtime
from mpiddp.nn import functional as F  # noqa: N812 (its customary name)
from mpiddp.optim import SGD
from mpiddp.parallel import DistributedDataParallel

from .averaging import AveragedModel, NaiveAveraging
from .checkpoint import save_model, write_whole
from .config import Config, UsageError
from .metrics import JsonLines
from .models import MODELS
from .report import Console, configuration_lines
from .trainer import Callback, Trainer

TEST_BATCH = 256
"""Samples that a rank evaluates at once."""

_Result = TypeVar("_Result")


def together(action: Callable[[], _Result]) -> _Result:
    """Do something that may fail on some ranks only, such as reading a file; if it does, all ranks know.

    Raises
    ------
    UsageError
        On every rank, with the text of the first that failed by an OSError, ValueError, ImportError or UsageError.
    """
    fault, result = None, None
    try:
        result = action()
    except (OSError, ValueError, ImportError, UsageError) as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank, text in enumerate(faults):
        if text is not None:
            alone = "" if faults.count(text) == len(faults) else f" (rank {rank})"
            raise UsageError(text + alone)
    return result  # type: ignore[return-value]


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
    fault = cuda_fault() if config.device == "cuda" else None
    if fault:
        raise UsageError(f"--device cuda: {fault}")


def build_model(config: Config) -> AveragedModel:
    """Return the model that a configuration names, equal on all ranks, with averaged gradients."""
    nn.manual_seed(config.seed)
    nn.random.set_stream(dist.get_rank())
    module = MODELS[config.model](dropout=config.dropout)
    return NaiveAveraging(module) if config.average == "naive" else DistributedDataParallel(module)


def build_trainer(
    config: Config, data: tuple[ArrayDataset, ArrayDataset], callbacks: dict[str, list[Callback]]
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
        callbacks=callbacks,
    )


def run(config: Config) -> int:
    """Train as a configuration says, and return the exit code. Starts MPI."""
    tune_allocator()
    dist.init_process_group()
    world = runtime.start()
    callbacks: dict[str, list[Callback]] = {}
    if world.rank == 0:
        print(configuration_lines(config, world.size, len(set(world.nodes))), flush=True)
        console = Console(config.epochs)
        callbacks = {
            "epoch_begin": [console.epoch_begin],
            "step_end": [console.step_end],
            "epoch_end": [console.epoch_end],
        }
    together(lambda: check_request(config))
    trainer = build_trainer(config, together(lambda: load_data(config)), callbacks)
    lines = together(lambda: _metrics_files(config) if world.rank == 0 else [])
    trainer.callbacks["epoch_end"] += [_line_writer(file) for file in lines]
    trainer.fit(config.epochs)
    together(lambda: _save(config, trainer) if world.rank == 0 else None)
    for file in lines:
        file.close()
    dist.destroy_process_group()
    return 0


def _metrics_files(config: Config) -> list[JsonLines]:
    """Open the files that take a line per epoch."""
    paths = [config.metrics, config.output and config.output / "metrics.jsonl"]
    return [JsonLines(path) for path in paths if path is not None]


def _line_writer(file: JsonLines) -> Callback:
    """Return a callback that writes the metrics of the epoch that has ended."""
    return lambda trainer: file.write(trainer.history[-1])


def _save(config: Config, trainer: Trainer) -> None:
    """Save the model and the configuration, and say where."""
    if config.output is None:
        print("no --output DIR, so the model is not saved", flush=True)
        return
    save_model(config.output / "model.safetensors", trainer.model.module)
    write_whole(config.output / "config.json", (json.dumps(config.as_dict(), indent=2) + "\n").encode())
    print(f"saved {config.output / 'model.safetensors'}", flush=True)
