"""The main job, ``python -m mpiddp train``: from a `Config` to a trained model."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mpiddp.distributed as dist
from mpiddp.data import Dataset
from mpiddp.device.allocator import tune_allocator
from mpiddp.distributed.shrink import expect_no_failures
from mpiddp.errors import EXIT_CHECKPOINTED
from mpiddp.faults import monitor
from mpiddp.parallel import DistributedDataParallel, Timeline
from mpiddp.serialization import write_atomically

from . import info
from .build import agree_on_device, build_trainer, gpu_fault
from .checkpoint import Checkpointer, save_model, sweep
from .config import Config, RunError, UsageError
from .data import load_data
from .elastic import RestorePoint, Snapshot
from .info import git_commit
from .outputs import Console, Outputs, RankLog, configuration_lines, say
from .ranks import raise_on_all_ranks
from .stop import Deadline, StopRequest, deadline_of
from .trainer import Callback, Trainer
from .user_code import sanity_check

EXIT_INTERRUPTED = 130
"""As a shell reports a command ended by Ctrl-C."""


def check_request(config: Config) -> None:
    """Refuse a configuration that these ranks cannot run."""
    ranks = dist.get_world_size()
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
    """Refuse a folder that is a file, or lies in one."""
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UsageError(f"{option}: {place} is a file, where a folder is wanted: give another name")
            return


def run(config: Config, version: str) -> int:
    """Train as configured, and return the exit code. Starts MPI.

    Parameters
    ----------
    config : Config
        The configuration.
    version : str
        Of mpiddp, for the description of the run.

    Raises
    ------
    UsageError
        On every rank, if the configuration cannot be run; RunError, if the run failed.
    """
    began_s = time.monotonic()
    tune_allocator()
    no_gpu = gpu_fault(config.device)
    dist.init_process_group()
    world = monitor.start().world
    first = world.rank == 0
    on_gpu = agree_on_device(config.device, no_gpu)
    here = dataclasses.replace(config, device="cuda" if on_gpu else "cpu")
    if first:
        say(configuration_lines(here, world.size, len(set(world.nodes))))
    raise_on_all_ranks(lambda: check_request(config))
    data = load_data(config)
    logs = config.output / "logs" if config.log_ranks and config.output else None
    log = raise_on_all_ranks(lambda: RankLog(world.rank, world.size, logs))
    # Other nodes may not know the end of the job.
    deadline = raise_on_all_ranks(lambda: _deadline(config, began_s) if first else None)
    with log, StopRequest(_known_to_all(deadline)) as stop:
        trainer = build_trainer(here, data, stop=stop)
        raise_on_all_ranks(lambda: sanity_check(trainer, here, data))
        checkpointer = None
        if config.output is not None:
            surroundings = info.collect(version)
            checkpointer = Checkpointer(config, surroundings["versions"])
            raise_on_all_ranks(checkpointer.claim)
            checkpointer.resume(trainer)
            # Last: a run that is refused leaves the folder's description as it was.
            raise_on_all_ranks(lambda: _describe(config, surroundings) if first else None)
        # Still inside: ranks do not get a signal at the same time, and a late one would end the saving.
        job = _Run(here, data, log, stop, checkpointer)
        code = job.run(trainer)
        if job.outputs is not None:
            job.outputs.close()
        dist.destroy_process_group()
    if code == EXIT_CHECKPOINTED:
        # srun -K terminates ranks that end a moment after the first, and would report that instead.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return code


@dataclasses.dataclass
class _Run:
    """A prepared run."""

    config: Config
    data: tuple[Dataset, Dataset]
    log: RankLog
    stop: StopRequest
    checkpointer: Checkpointer | None
    outputs: Outputs | None = None
    """Files that rank 0 writes after every epoch."""

    def run(self, trainer: Trainer) -> int:
        """Train to the end, with the surviving ranks if MPI allows it, and return the exit code."""
        point, heritage = RestorePoint(), None
        while True:
            try:
                if heritage is not None:
                    point = RestorePoint(heritage)
                    trainer = self._begun_again(heritage)
                code = self._train(trainer, point)
                expect_no_failures()
                return code
            except Exception as error:
                heritage = point.survive(error)

    def _begun_again(self, heritage: Snapshot) -> Trainer:
        """Return a trainer of the surviving ranks."""
        trainer = build_trainer(self.config, self.data, stop=self.stop)
        trainer.load_state_dict(heritage.state, heritage.arrays)
        if self.checkpointer is not None:
            self.checkpointer.regroup(trainer)
        return trainer

    def _train(self, trainer: Trainer, point: RestorePoint) -> int:
        """Train, write the outputs, and return the exit code."""
        point.note(trainer)
        timeline = _watched(trainer, self.config.timeline) if self.config.timeline else None
        raise_on_all_ranks(lambda: self._open_outputs(trainer))
        for event, callbacks in self._callbacks(point).items():
            trainer.callbacks[event] += callbacks
        try:
            trainer.fit(self.config.epochs)
        except FloatingPointError as error:
            raise RunError(str(error)) from error
        if trainer.stopped:
            code = _stop(self.stop, trainer, self.checkpointer)
        else:
            code = _finish(self.config, trainer, self.checkpointer)
        if timeline is not None:
            summary = raise_on_all_ranks(timeline.write, RunError)
            if dist.get_rank() == 0:
                say(f"{summary}\ntimeline written to {timeline.path}")
        return code

    def _open_outputs(self, trainer: Trainer) -> None:
        if dist.get_rank() == 0 and self.outputs is None:
            self.outputs = Outputs(self.config.metrics, self.config.output, trainer.history)
        elif self.outputs is not None:
            self.outputs.epoch_end(trainer)  # another rank may have completed one more epoch

    def _callbacks(self, point: RestorePoint) -> dict[str, list[Callback]]:
        """Return the callbacks: print, write, save, in this order."""
        console = Console(self.config.epochs) if dist.get_rank() == 0 else None
        callbacks: dict[str, list[Callback]] = {
            "epoch_begin": [who.epoch_begin for who in (console, self.log) if who],
            "step_end": [who.step_end for who in (console, self.checkpointer) if who],
            "epoch_end": [who.epoch_end for who in (console, self.outputs, self.checkpointer, self.log) if who],
        }
        return {event: [point.note, *others] for event, others in callbacks.items()}


def _describe(config: Config, surroundings: Mapping[str, Any]) -> None:
    """Write configuration and surroundings into the output folder."""
    assert config.output is not None
    sweep(config.output)
    write_atomically(config.output / "config.json", config.as_json().encode())
    commits = {"mpiddp": git_commit(Path(__file__)), "working directory": git_commit(Path.cwd())}
    described = {**surroundings, "commits": commits, "started": datetime.now(UTC).isoformat(timespec="seconds")}
    write_atomically(config.output / "run.json", (json.dumps(described, indent=1) + "\n").encode())


def _deadline(config: Config, began_s: float) -> Deadline | None:
    return deadline_of(config.max_time, config.margin, began_s) if config.max_time is not None else None


def _known_to_all(deadline: Deadline | None) -> Deadline | None:
    """Return rank 0's deadline by this rank's clock, because rank 0 may fail before it."""
    told = [None if deadline is None else (deadline.end_s - time.monotonic(), deadline.margin_s)]
    dist.broadcast_object_list(told, src=0)
    (left,) = told
    return None if left is None else Deadline(time.monotonic() + left[0], left[1])


def _watched(trainer: Trainer, path: Path) -> Timeline:
    """Return a timeline that records the trainer's steps from now on."""
    assert isinstance(trainer.model, DistributedDataParallel), "Config has checked it"
    timeline = Timeline(path)
    timeline.watch(trainer.optimizer)
    trainer.model.timeline = timeline
    return timeline


def _stop(stop: StopRequest, trainer: Trainer, checkpointer: Checkpointer | None) -> int:
    """Save a checkpoint after a signal or at the deadline, and return the exit code for a restart."""
    told: list[tuple[str | None, int]] = [(None, 0)] * dist.get_world_size()
    dist.all_gather_object(told, (stop.reason, stop.number))
    rank, reason, number = next((rank, *each) for rank, each in enumerate(told) if each[0])
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
    """Save the model and print its path."""
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
