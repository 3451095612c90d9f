"""The command ``python -m mpiddp train``. The functions stand in the order in which a run calls them."""

import dataclasses
import functools
import logging
import math
import signal
import time
from typing import Any

import mpiddp.distributed as dist
from mpiddp import elastic, nn
from mpiddp.device import cuda_fault
from mpiddp.device.allocator import tune_allocator
from mpiddp.distributed.groups import default_group
from mpiddp.errors import EXIT_CHECKPOINTED, EXIT_INTERRUPTED, DistError
from mpiddp.serialization import save

from . import info
from .build import Split, agree_on_device, build_trainer, load_data
from .checkpointer import Checkpointer, RestorePoint
from .config import Config
from .console import configuration_lines, epoch_line, say, warnings_of
from .metrics_files import MetricsFiles
from .options import RunError, refusing
from .ranks import broadcasted, gathered, raise_on_all_ranks
from .run_folder import describe
from .stop import StopRequest, seconds_left
from .trainer import Trainer

_logger = logging.getLogger(__name__)


def run(config: Config, version: str) -> int:
    """Start MPI, train a model, and return the exit code.

    Every rank raises UsageError if the configuration cannot be run. Every rank raises RunError if the run stops because
    the loss or gradients are not finite, or if the model or the last checkpoint cannot be written.
    """
    began_s = time.monotonic()
    tune_allocator()
    # `cuda_fault` imports CuPy. It has to run before `init_process_group`, which chooses this rank's GPU only if CuPy
    # is imported.
    no_gpu = "--device cpu" if config.device == "cpu" else cuda_fault()
    dist.init_process_group("nccl" if no_gpu is None else None)
    world = default_group()._link.world
    # `StopRequest` handles signals until the job ends. Otherwise a signal that reaches one rank late would kill it
    # while the ranks save the checkpoint.
    with warnings_of(world.rank, world.size), StopRequest() as stop:
        job = Job(config, stop)
        prepare = functools.partial(_prepare, job, version, began_s, no_gpu)
        train = functools.partial(_train, job)
        code = elastic.go_on(train, prepare=prepare, spares=config.spares, survivable=job.survivable)
        if job.files is not None:
            job.files.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    if code == EXIT_CHECKPOINTED:
        # After the first rank has ended with this code, srun -K terminates the others and would report the signal
        # instead of the code. A second SIGUSR1 would have the same effect. The ranks therefore ignore both.
        for each in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, signal.SIG_IGN)
    return code


@dataclasses.dataclass
class Job:
    """The objects of a run that stay when a rank dies and the others go on."""

    config: Config
    stop: StopRequest
    point: RestorePoint = dataclasses.field(default_factory=RestorePoint)
    surroundings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The description of the job (`info.collect`), for ``run.json``; empty without ``--output``."""
    data: Split = dataclasses.field(init=False)
    """Training data and test data."""
    checkpointer: Checkpointer | None = None
    files: MetricsFiles | None = None
    """The files of metrics, on rank 0; None on other ranks."""

    def survivable(self) -> bool:
        """Return True if the configuration allows the run to go on after the death of a rank.

        With ``--zero`` a death loses a part of the optimizer's state. On GPUs, going on after a death is untested.
        """
        return not self.config.zero and self.config.device != "cuda"


def _prepare(job: Job, version: str, began_s: float, no_gpu: str | None, ranks: int) -> None:
    """Check the request, load the data, and begin to listen to signals. Spare ranks call this too."""
    config, first = job.config, dist.get_rank() == 0
    on_gpu = agree_on_device(config.device, no_gpu)
    job.config = dataclasses.replace(config, device="cuda" if on_gpu else "cpu")
    if first:
        say(configuration_lines(job.config, ranks, len(set(default_group()._link.world.nodes))))
    with refusing(f"--spares {config.spares}: ", ValueError, DistError):
        elastic.check_spares(config.spares)
    job.data = load_data(config)
    if config.output is not None:
        job.surroundings = info.collect(version)
        job.checkpointer = Checkpointer(job.config, job.surroundings["versions"])
    # Rank 0 computes the time left and broadcasts it, because other nodes may not know when the Slurm job ends. If rank
    # 0 raises an error, all ranks do.
    left_s = raise_on_all_ranks(
        lambda: seconds_left(config.max_time, began_s) if first and config.max_time else math.inf
    )
    job.stop.listen(time.monotonic() + broadcasted(left_s, 0), config.margin)


def _train(job: Job, change: elastic.Change | None) -> int:
    """Train until all epochs are done or a stop is requested, and return the exit code.

    After a rank has died, `elastic.go_on` calls this again with the ``change`` of the world.
    """
    config = job.config
    trainer = _begin(job) if change is None else _go_on(job, change)
    job.point.note(trainer)
    raise_on_all_ranks(lambda: _open_files(job, trainer))
    if trainer.model.timeline is not None:
        trainer.model.timeline.watch(trainer.optimizer)
    skipped = trainer.skipped
    with refusing("", FloatingPointError, by=RunError):
        for ended in trainer.moments(config.epochs):
            job.point.note(trainer)  # before any communication, which may fail when a rank dies
            if ended == "epoch" and job.files is not None:
                say(epoch_line(trainer.history[-1], config.epochs))
                if left_out := trainer.skipped - skipped:
                    said = "%d steps of epoch %d left out: loss or gradients were not finite"
                    _logger.warning(said, left_out, trainer.epoch)
                skipped = trainer.skipped
                job.files.write(trainer.history)
            due = config.checkpoint_steps and trainer.step % config.checkpoint_steps == 0
            if job.checkpointer is not None and (ended == "epoch" or due):
                job.checkpointer.save(trainer)
    return _stop(job, trainer) if trainer.stopped else _finish(job, trainer)


def _begin(job: Job) -> Trainer:
    """Return the trainer of a run that begins anew or resumes from a checkpoint."""
    trainer = build_trainer(job.config, job.data, stop=job.stop)
    if job.checkpointer is not None:
        raise_on_all_ranks(job.checkpointer.claim)
        job.checkpointer.resume(trainer)
        # The description is written last, so that a run that is refused leaves the folder's files as they were.
        first = dist.get_rank() == 0
        raise_on_all_ranks(lambda: describe(job.config, job.surroundings) if first else None)
    return trainer


def _go_on(job: Job, change: elastic.Change) -> Trainer:
    """Return the trainer of a run that goes on after a death, with the state of the most advanced rank.

    If no living rank has recorded a state, the run begins anew or resumes from a checkpoint.
    """
    config, first = job.config, dist.get_rank() == 0
    snapshot = job.point.farthest()
    if snapshot is None:
        if first:
            _logger.warning("%s before the first step; beginning anew with %d ranks", change, change.size)
        if len(change.died) == change.before and job.checkpointer is not None:
            # All ranks that trained have died, so the spares can go on only from a checkpoint.
            job.config = dataclasses.replace(config, resume="auto")
            job.checkpointer = Checkpointer(job.config, job.surroundings["versions"])
        return _begin(job)
    trainer = build_trainer(job.config, job.data, stop=job.stop)
    trainer.load_state_dict(*snapshot)
    if job.checkpointer is not None:
        job.checkpointer.regroup(trainer)
    if first:
        drops = any(isinstance(each, nn.Dropout) and each.p for each in trainer.model.module.modules())
        fewer = change.size < change.before and not config.virtual_ranks
        masks = "; dropout draws other masks than before" if drops and fewer else ""
        _logger.warning(
            "%s; going on after step %d with %d of %d ranks%s",
            *(change, trainer.step, change.size, change.before, masks),
        )
    return trainer


def _open_files(job: Job, trainer: Trainer) -> None:
    if dist.get_rank() == 0:
        job.files = job.files or MetricsFiles(job.config.metrics, job.config.output, trainer.history)
        job.files.write(trainer.history)  # rank 0 may just have got the state of a rank that was an epoch ahead


def _stop(job: Job, trainer: Trainer) -> int:
    requests = enumerate(gathered((job.stop.reason, job.stop.number)))
    rank, reason, number = next((rank, *request) for rank, request in requests if request[0])
    checkpointer = job.checkpointer
    if checkpointer is not None:
        checkpointer.save(trainer)
        checkpointer.finish()
    if dist.get_rank() == 0:
        saved = "saved a checkpoint; go on with --resume auto" if checkpointer else "nothing saved: no --output DIR"
        say(f"{reason} on rank {rank}: stopped after step {trainer.step}, {saved}")
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_CHECKPOINTED if checkpointer is not None else 128 + number


def _finish(job: Job, trainer: Trainer) -> int:
    first, output = dist.get_rank() == 0, job.config.output
    if output is not None:
        path = output / "model.safetensors"
        raise_on_all_ranks(lambda: save(trainer.model.module.state_dict(), path) if first else None, RunError)
    if first:
        say(f"saved {path}" if output else "no --output DIR, so the model is not saved")
    if job.checkpointer is not None:
        # The model is saved first: `finish` raises an error if the last checkpoint could not be written.
        job.checkpointer.finish()
    return 0
