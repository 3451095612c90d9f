"""The main job, ``python -m mpiddp train``: from a `Config` to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mpiddp.distributed as dist
from mpiddp import elastic, nn
from mpiddp.data import Dataset
from mpiddp.device.allocator import tune_allocator
from mpiddp.distributed.groups import default_group
from mpiddp.distributed.shrink import survivable
from mpiddp.errors import EXIT_CHECKPOINTED, EXIT_INTERRUPTED
from mpiddp.parallel import DistributedDataParallel, Timeline
from mpiddp.serialization import write_atomically
from mpiddp.typing import Array

from . import info
from .build import agree_on_device, build_trainer, gpu_fault
from .checkpoint import save_model, sweep
from .checkpointer import Checkpointer
from .config import Config, RunError, UsageError
from .data import load_data
from .outputs import Console, Outputs, RankLog, configuration_lines, say
from .ranks import arrays_from, broadcasted, gathered, raise_on_all_ranks
from .stop import Deadline, StopRequest, deadline_of
from .trainer import Callback, Trainer
from .user_code import sanity_check

_logger = logging.getLogger(__name__)


def check_request(config: Config, ranks: int) -> None:
    """Refuse a configuration that ``ranks`` ranks, without spares, cannot run."""
    if config.spares and not survivable():
        raise UsageError(f"--spares {config.spares} needs ranks that live on when one dies: {elastic.NEEDED}")
    if ranks < 1:
        raise UsageError(f"--spares {config.spares} leaves no rank to train: start {config.spares + 1} or more")
    if config.batch_size < ranks:
        raise UsageError(
            f"--batch-size {config.batch_size} is that of all ranks together: give {ranks} or more, or start fewer"
        )
    if config.output is not None:
        _check_folder("--output", config.output)
    for option, file in (("--metrics", config.metrics), ("--timeline", config.timeline)):
        if file is not None:
            _check_folder(option, file.parent)
            if file.is_dir():
                raise UsageError(f"{option} {file} is a folder: give the name of a file in it")


def _check_folder(option: str, folder: Path) -> None:
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UsageError(f"{option}: {place} is a file, where a folder is wanted: give another name")
            return


def run(config: Config, version: str) -> int:
    """Return the exit code; starts MPI. UsageError on every rank for a configuration, RunError for a failed run."""
    began_s = time.monotonic()
    tune_allocator()
    no_gpu = gpu_fault(config.device)
    dist.init_process_group("nccl" if no_gpu is None else None)
    with contextlib.ExitStack() as stack:
        job = _Run(config, version, began_s, no_gpu, stack)
        code = elastic.go_on(job.train, prepare=job.prepare, spares=config.spares, survivable=job.survivable)
        if job.outputs is not None:
            job.outputs.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    if code == EXIT_CHECKPOINTED:
        # srun -K terminates ranks that end a moment after the first, and would report that instead; so would a second
        # SIGUSR1.
        for each in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, signal.SIG_IGN)
    return code


class _Run:
    """A run, with what outlives the death of a rank."""

    def __init__(
        self, config: Config, version: str, began_s: float, no_gpu: str | None, stack: contextlib.ExitStack
    ) -> None:
        self.outputs: Outputs | None = None
        self._config = self._here = config
        self._version, self._began_s, self._no_gpu = version, began_s, no_gpu
        self._stack = stack
        self._point = RestorePoint()
        self._checkpointer: Checkpointer | None = None
        self._surroundings: dict[str, Any] = {}
        self._data: tuple[Dataset, Dataset]
        self._log: RankLog | None = None
        # Until the end: a signal that is late on one rank would end the saving.
        self._stop = stack.enter_context(StopRequest())

    def prepare(self, ranks: int) -> None:
        """Load the data and begin to listen to signals, on spares too."""
        config = self._config
        world = default_group().link.world
        first = dist.get_rank() == 0
        on_gpu = agree_on_device(config.device, self._no_gpu)
        self._here = dataclasses.replace(config, device="cuda" if on_gpu else "cpu")
        if first:
            say(configuration_lines(self._here, ranks, len(set(world.nodes))))
        raise_on_all_ranks(lambda: check_request(config, ranks))
        self._data = load_data(config)
        if config.output is not None:
            self._surroundings = info.collect(self._version)
        logs = config.output / "logs" if config.log_ranks and config.output else None
        log = raise_on_all_ranks(lambda: self._log or RankLog(world.rank, world.size, logs))
        # Other nodes may not know the end of the job.
        deadline = raise_on_all_ranks(
            lambda: deadline_of(config.max_time, config.margin, self._began_s) if first and config.max_time else None
        )
        deadline = _known_to_all(deadline)
        if self._log is None:
            self._log = self._stack.enter_context(log)
            self._stop.listen(deadline)

    def survivable(self) -> bool:
        """Return False if some state is on single ranks only, or on GPUs, with which no death has been tried."""
        return not self._config.zero and self._here.device != "cuda"

    def train(self, change: elastic.Change | None) -> int:
        """Go on from the state before the death of a rank; return the exit code."""
        if change is None:
            trainer = self._started(self._config)
        elif (source := elastic.farthest(self._point.moment)) is None:
            if dist.get_rank() == 0:
                _logger.warning("%s before the first step; beginning anew with %d ranks", change, change.size)
            # Without survivors the spares have the checkpoints only.
            alone = len(change.died) == change.before and self._config.output is not None
            trainer = self._started(dataclasses.replace(self._config, resume="auto") if alone else self._config)
        else:
            trainer = self._resumed(source, change)
        return self._train(trainer)

    def _started(self, config: Config) -> Trainer:
        trainer = build_trainer(self._here, self._data, stop=self._stop)
        raise_on_all_ranks(lambda: sanity_check(trainer, self._here, self._data))
        if config.output is not None:
            checkpointer = self._checkpoints(config)
            raise_on_all_ranks(checkpointer.claim)
            checkpointer.resume(trainer)
            # Last: a refused run leaves the folder's description as it was.
            first = dist.get_rank() == 0
            raise_on_all_ranks(lambda: _describe(config, self._surroundings) if first else None)
        return trainer

    def _resumed(self, source: int, change: elastic.Change) -> Trainer:
        """Continue with the state of rank ``source``."""
        snapshot = self._point.snapshot(source)
        trainer = build_trainer(self._here, self._data, stop=self._stop)
        trainer.load_state_dict(*snapshot)
        if self._config.output is not None:
            self._checkpoints(self._config).regroup(trainer)
        if dist.get_rank() == 0:
            drops = any(isinstance(each, nn.Dropout) and each.p for each in trainer.model.module.modules())
            masks = "; dropout draws other masks than before" if drops and change.size < change.before else ""
            _logger.warning(
                "%s; going on after step %d with %d of %d ranks%s",
                *(change, trainer.step, change.size, change.before, masks),
            )
        return trainer

    def _checkpoints(self, config: Config) -> Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(config, self._surroundings["versions"])
        return self._checkpointer

    def _train(self, trainer: Trainer) -> int:
        self._point.note(trainer)
        timeline = _watched(trainer, self._config.timeline) if self._config.timeline else None
        raise_on_all_ranks(lambda: self._open_outputs(trainer))
        for event, callbacks in self._callbacks().items():
            trainer.callbacks[event] += callbacks
        try:
            trainer.fit(self._config.epochs)
        except FloatingPointError as error:
            raise RunError(str(error)) from error
        if trainer.stopped:
            code = _stop(self._stop, trainer, self._checkpointer)
        else:
            code = _finish(self._config, trainer, self._checkpointer)
        if timeline is not None:
            summary = raise_on_all_ranks(timeline.write, RunError)
            if dist.get_rank() == 0:
                say(f"{summary}\ntimeline written to {timeline.path}")
        return code

    def _open_outputs(self, trainer: Trainer) -> None:
        if dist.get_rank() == 0 and self.outputs is None:
            self.outputs = Outputs(self._config.metrics, self._config.output, trainer.history)
        elif self.outputs is not None:
            self.outputs.epoch_end(trainer)  # another rank may have completed one more epoch

    def _callbacks(self) -> dict[str, list[Callback]]:
        """Return the callbacks in the order print, write, save."""
        console = Console(self._config.epochs) if dist.get_rank() == 0 else None
        callbacks: dict[str, list[Callback]] = {
            "epoch_begin": [who.epoch_begin for who in (console, self._log) if who],
            "step_end": [who.step_end for who in (console, self._checkpointer) if who],
            "epoch_end": [who.epoch_end for who in (console, self.outputs, self._checkpointer, self._log) if who],
        }
        return {event: [self._point.note, *others] for event, others in callbacks.items()}


Snapshot = tuple[dict[str, Any], dict[str, Array]]
"""Arguments of `Trainer.load_state_dict`."""


class RestorePoint:
    """The last consistent moment (steps and epochs made) of the run on this rank, and the way back to it.

    Only an optimizer's step changes parameters and its state, and it waits for no one: these are always consistent.
    Changes of forward and loader since are copied here; dropout follows from the step. A communication hook's memory is
    that of the most advanced rank.
    """

    def __init__(self) -> None:
        self.moment: tuple[int, int] | None = None
        self._loaded: Snapshot | None = None
        self._trainer: Trainer | None = None
        self._loader: dict[str, Any] = {}
        self._buffers: list[Array] = []

    def note(self, trainer: Trainer) -> None:
        """Record this moment; run before all other callbacks."""
        if not survivable():
            return
        self._loaded = None
        self._trainer, self.moment = trainer, (trainer.step, trainer.epoch)
        self._loader = trainer.train_loader.state_dict()
        self._buffers = [x.copy() for x in trainer.model.module.buffers()]

    def snapshot(self, source: int) -> Snapshot:
        """Return the state of rank ``source``, from now on this rank's too; collective."""
        state, arrays = self._snapshot() if dist.get_rank() == source else ({}, {})
        state, arrays = broadcasted(state, source), dict(arrays_from(source, arrays))
        self._loaded = state, arrays
        self.moment = state["step"], state["epoch"]
        return self._loaded

    def _snapshot(self) -> Snapshot:
        if self._loaded is not None:
            return self._loaded
        trainer = self._trainer
        assert trainer is not None, "there is a moment"
        trainer.train_loader.load_state_dict(self._loader)
        for x, kept in zip(trainer.model.module.buffers(), self._buffers, strict=True):
            x[...] = kept
        return trainer.common_state(), trainer.arrays() | trainer.own_arrays()


def _describe(config: Config, surroundings: Mapping[str, Any]) -> None:
    assert config.output is not None
    sweep(config.output)
    write_atomically(config.output / "config.json", config.as_json().encode())
    commits = {"mpiddp": info.git_commit(Path(__file__)), "working directory": info.git_commit(Path.cwd())}
    described = {**surroundings, "commits": commits, "started": datetime.now(UTC).isoformat(timespec="seconds")}
    write_atomically(config.output / "run.json", (json.dumps(described, indent=1) + "\n").encode())


def _known_to_all(deadline: Deadline | None) -> Deadline | None:
    """Return rank 0's deadline by this rank's clock: rank 0 may fail before it."""
    left = broadcasted(None if deadline is None else (deadline.end_s - time.monotonic(), deadline.margin_s), 0)
    return None if left is None else Deadline(time.monotonic() + left[0], left[1])


def _watched(trainer: Trainer, path: Path) -> Timeline:
    assert isinstance(trainer.model, DistributedDataParallel), "Config has checked it"
    timeline = Timeline(path)
    timeline.watch(trainer.optimizer)
    trainer.model.timeline = timeline
    return timeline


def _stop(stop: StopRequest, trainer: Trainer, checkpointer: Checkpointer | None) -> int:
    """Save a checkpoint, and return the exit code for a restart."""
    requests = enumerate(gathered((stop.reason, stop.number)))
    rank, reason, number = next((rank, *request) for rank, request in requests if request[0])
    said = f"{reason} on rank {rank}: stopped after step {trainer.step}"
    if checkpointer is not None:
        checkpointer.save(trainer)
        raise_on_all_ranks(lambda: _last_written(checkpointer), RunError)
    if dist.get_rank() == 0:
        saved = "saved a checkpoint; go on with --resume auto" if checkpointer else "nothing saved: no --output DIR"
        say(f"{said}, {saved}")
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_CHECKPOINTED if checkpointer is not None else 128 + number


def _finish(config: Config, trainer: Trainer, checkpointer: Checkpointer | None) -> int:
    first = dist.get_rank() == 0
    if config.output is not None:
        path = config.output / "model.safetensors"
        raise_on_all_ranks(lambda: save_model(path, trainer.model.module) if first else None, RunError)
    if first:
        say(f"saved {path}" if config.output else "no --output DIR, so the model is not saved")
    if checkpointer is not None:
        # After the model, which is saved even if the last checkpoint cannot be written.
        raise_on_all_ranks(lambda: _last_written(checkpointer), RunError)
    return 0


def _last_written(checkpointer: Checkpointer) -> None:
    try:
        checkpointer.finish()
    except OSError as error:
        raise OSError(f"the last checkpoint could not be written ({error})") from error
