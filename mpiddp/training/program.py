"""The main job, ``python -m mpiddp train``: from a `Config` to a trained model."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

import mpiddp.distributed as dist
from mpiddp.device.host_memory import tune_allocator
from mpiddp.errors import EXIT_CHECKPOINTED
from mpiddp.mpi import runtime
from mpiddp.parallel import DistributedDataParallel, Timeline

from . import devices, environment
from .building import build_trainer
from .checkpoint import save_model
from .config import Config, RunError, UsageError
from .data import load_data
from .deadline import Deadline, deadline_of
from .keeper import Keeper
from .outputs import Outputs
from .rank_log import RankLog
from .report import Console, configuration_lines, say
from .signals import StopRequest
from .together import together
from .trainer import Callback, Trainer
from .trial import try_out

EXIT_INTERRUPTED = 130
"""As of a shell's command that Ctrl-C ended."""


def check_request(config: Config) -> None:
    """Refuse what these ranks cannot do."""
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
    """Refuse a folder that is a file, or is to be in one."""
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UsageError(f"{option}: {place} is a file, where a folder is wanted: give another name")
            return


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
    began_s = time.monotonic()
    tune_allocator()
    no_gpu = devices.fault(config.device)
    dist.init_process_group()
    world = runtime.start()
    first = world.rank == 0
    on_gpu = devices.agree(config.device, no_gpu)
    here = dataclasses.replace(config, device="cuda" if on_gpu else "cpu")
    if first:
        say(configuration_lines(here, world.size, len(set(world.nodes))))
    together(lambda: check_request(config))
    data = load_data(config)
    logs = config.output / "logs" if config.log_ranks and config.output else None
    log = together(lambda: RankLog(world.rank, world.size, logs))
    # One clock decides; and other nodes may not have been told when the job ends.
    deadline = together(lambda: _deadline(config, began_s) if first else None)
    with log, StopRequest(deadline) as stop:
        trainer = build_trainer(here, data, stop=stop)
        together(lambda: try_out(trainer, here, data))
        keeper = Keeper(config, first) if config.output else None
        if keeper is not None:
            together(keeper.claim)
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
        # Still inside: a signal that comes late, as ranks do not get it at the same time, would end the saving.
        code = _stop(stop, trainer, keeper) if trainer.stopped else _finish(config, trainer, keeper)
        if timeline is not None:
            summary = together(timeline.write, RunError)
            if first:
                say(f"{summary}\ntimeline written to {timeline.path}")
        dist.destroy_process_group()
    if code == EXIT_CHECKPOINTED:
        # srun -K terminates the ranks that leave a moment after the first, and would report that instead.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return code


def _deadline(config: Config, began_s: float) -> Deadline | None:
    return deadline_of(config.max_time, config.margin, began_s) if config.max_time is not None else None


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
    """Save a checkpoint after a signal or at the deadline, and return the exit code that asks for another start."""
    told: list[tuple[str | None, int]] = [(None, 0)] * dist.get_world_size()
    dist.all_gather_object(told, (stop.reason, stop.number))
    rank, reason, number = next((rank, *each) for rank, each in enumerate(told) if each[0])
    said = f"{reason} on rank {rank}: stopped after step {trainer.step}"
    if keeper is not None:
        keeper.save(trainer)
        together(lambda: _last_written(keeper), RunError)
    if dist.get_rank() == 0:
        saved = "saved a checkpoint; go on with --resume auto" if keeper else "nothing saved: no --output DIR"
        say(f"{said}, {saved}")
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_CHECKPOINTED if keeper is not None else 128 + number


def _finish(config: Config, trainer: Trainer, keeper: Keeper | None) -> int:
    """Save the model, and say where it is."""
    first = dist.get_rank() == 0
    if config.output is not None:
        path = config.output / "model.safetensors"
        together(lambda: save_model(path, trainer.model.module) if first else None, RunError)
    if first:
        say(f"saved {path}" if config.output else "no --output DIR, so the model is not saved")
    if keeper is not None:
        # After the model, which is there then even if the last checkpoint cannot be written.
        together(lambda: _last_written(keeper), RunError)
    return 0


def _last_written(keeper: Keeper) -> None:
    try:
        keeper.finish()
    except OSError as error:
        raise OSError(f"the last checkpoint could not be written ({error})") from error
