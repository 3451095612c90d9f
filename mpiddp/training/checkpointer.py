"""``Checkpointer`` saves a run's checkpoints and resumes from them; ``RestorePoint`` restores a state without files."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import IO, Any

import mpiddp.distributed as dist
from mpiddp import elastic
from mpiddp.distributed.shrink import survivable
from mpiddp.typing import Array

from . import reproducibility
from .build import group_options
from .checkpoint import Checkpoint, CheckpointStore, sweep, write_shard
from .config import Config
from .console import say
from .options import RunError, UsageError, refusing
from .ranks import gathered, raise_on_all_ranks, state_from
from .run_folder import locked
from .trainer import Trainer

_MUST_AGREE = ("model", "data", "seed", "optimizer")

_logger = logging.getLogger(__name__)


class Checkpointer:
    """The saving of a run's checkpoints, and the resumption from them. All ranks call each public method together."""

    def __init__(self, config: Config, versions: Mapping[str, str] | None = None) -> None:
        assert config.output is not None
        self._config = config
        self._versions = dict(versions or {})
        self._store = CheckpointStore(config.output / "checkpoints", config.keep)
        """The store, to which only rank 0 saves. Every rank has one, as another process may be rank 0 after a death."""
        self._lock: IO[str] | None = None
        self._saved: tuple[int, int] | None = None

    def claim(self) -> None:
        """Lock the output folder on rank 0, and remove unfinished checkpoints that dead runs have left in it.

        Rank 0 raises BlockingIOError if another run has locked the folder, and UsageError if the folder has
        checkpoints, but ``--resume`` is not given.
        """
        self._reclaim()
        if dist.get_rank() == 0 and self._config.resume == "no" and self._store.steps():
            raise UsageError(
                f"{self._store.folder} holds checkpoints of an earlier run: --resume auto goes on with it, another"
                " --output (or removing that folder) begins anew"
            )

    def save(self, trainer: Trainer) -> None:
        """Save a checkpoint in the background, unless this step and epoch are already saved.

        If a checkpoint cannot be written, rank 0 logs the error when it saves the next one; for the last checkpoint
        `finish` raises the error. The checkpoint's score is the accuracy after the last epoch, if no step has changed
        the model since that test.
        """
        if self._saved == (trainer.epoch, trainer.step):
            return
        self._saved = (trainer.epoch, trainer.step)
        tested = bool(trainer.history) and not trainer.running["samples"]
        state = trainer.state_dict() | {
            "score": trainer.history[-1].accuracy if tested else None,
            "config": self._config.as_dict(),
            "bits": reproducibility.current(),
            "versions": self._versions,
        }
        self._finish_previous()
        shards = self._write_shards(trainer)
        if dist.get_rank() == 0:
            self._store.save(Checkpoint(state), shards)

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk; all ranks raise RunError if it could not be written."""
        written = refusing("the last checkpoint could not be written (", OSError, by=RunError, after=")")
        raise_on_all_ranks(written(self._store.finish), RunError)

    def regroup(self, trainer: Trainer) -> None:
        """Go on after a death: lock the folder on the new rank 0, and save the current state.

        All ranks that go on call this together.
        """
        self._saved = None
        self._finish_previous()
        raise_on_all_ranks(self._reclaim)
        self.save(trainer)  # if rank 0 died, so did the checkpoint that it was writing

    def _reclaim(self) -> None:
        if dist.get_rank() == 0:
            self._lock = self._lock or locked(self._store.folder.parent)
            sweep(self._store.folder)

    def _finish_previous(self) -> None:
        try:
            self._store.finish()
        except OSError as error:
            _logger.warning("the previous checkpoint could not be written (%s); training goes on", error)

    def _write_shards(self, trainer: Trainer) -> dict[int, Any]:
        """Write this rank's own state, if it has any; return all ranks' shards, as `Checkpoint.write` takes them.

        All ranks call this together.
        """
        own, rank = trainer.own_state(), dist.get_rank()
        written: Any = None
        dist.barrier()  # until rank 0 has finished the previous save, which may remove shards of the same step
        if any(own.values()):
            try:
                written = write_shard(self._store.path(trainer.step), rank, own)
            except OSError as error:
                written = f"rank {rank}: {error}"
        return {rank: each for rank, each in enumerate(gathered(written)) if each is not None}

    def resume(self, trainer: Trainer) -> None:
        """Continue from the newest undamaged checkpoint, if ``--resume`` asks for it and there is one.

        Rank 0 reads the checkpoint and broadcasts it. Every rank raises UsageError if the checkpoint was made with
        another model, data, seed or optimizer, or if all checkpoints are damaged.
        """
        if self._config.resume == "no":
            return
        found = raise_on_all_ranks(self._newest)
        state = state_from(0, found.state if found else None)
        if state is None:
            return
        for name in _MUST_AGREE:
            then, now = state["config"].get(name), getattr(self._config, name)
            if then not in (None, now):
                raise UsageError(
                    f"the checkpoint to resume from was made with {name}={then}, this run has {name}={now}; give the"
                    " same, or another --output"
                )
        ranks = state["bits"]["ranks"]
        shards = (state_from(0, found.shards.get(rank, {}) if found else {}) for rank in range(ranks))
        own = [trainer.wanted(shard, rank, ranks) for rank, shard in enumerate(shards)]
        fits = refusing(
            "the checkpoint to resume from is not one of this model and these data: ",
            *(RuntimeError, ValueError),
            after="; give those that it was made with, or another --output",
        )
        raise_on_all_ranks(functools.partial(fits(trainer.load_state_dict), state, own))
        _apply_changed_options(trainer, state["config"], self._config)
        self._saved = (trainer.epoch, trainer.step)
        if dist.get_rank() == 0:
            done, epochs = trainer.epoch, self._config.epochs
            where = f"in epoch {done + 1}" if done < epochs else f"with all {epochs} epochs done"
            say(f"resumed after step {trainer.step}, {where}, from {self._store.folder}")
            for difference in reproducibility.differences(state["bits"]):
                said = "%s was %s and is %s: the last bits of results may differ from an unbroken run's"
                _logger.warning(said, *difference)

    def _newest(self) -> Checkpoint | None:
        if dist.get_rank() > 0:
            return None
        checkpoint, faults = self._store.newest()
        if checkpoint is None and faults:
            # The run does not begin anew: a file system that fails for a while must not cost days of training.
            raise UsageError(
                f"no checkpoint in {self._store.folder} is whole ({'; '.join(faults)}): mend that, or remove the folder"
                " to begin anew"
            )
        for fault in faults:
            _logger.warning("skipped a damaged checkpoint: %s", fault)
        return checkpoint


def _apply_changed_options(trainer: Trainer, then: Mapping[str, Any], config: Config) -> None:
    old, new = group_options(then), group_options(config.as_dict())
    if then["schedule"] != "constant" or then["warmup_steps"]:
        del old["lr"]  # the learning rate in the checkpoint was set by its schedule, not by --lr
    if trainer.scheduler is not None:
        del new["lr"]  # the schedule sets the learning rate
    for group in trainer.optimizer.param_groups:
        group |= {name: value for name, value in new.items() if value != old.get(name)}


Snapshot = tuple[dict[str, Any], list[dict[str, Any]]]
"""The arguments of `Trainer.load_state_dict`."""


class RestorePoint:
    """The state after this rank's last completed step.

    If a rank dies during a step, the others go on from the restore point of the rank that has made the most steps. Only
    a part of the state is copied. Parameters and the optimizer's state need no copy: only the optimizer's step changes
    them, and it does not communicate, so no death interrupts it. The forward changes buffers, and the loader advances,
    so `note` copies the buffers and the loader's position. Dropout needs no state, because its masks follow from the
    seed, the rank and the number of the step. The memory of a communication hook is taken from the most advanced rank.
    """

    def __init__(self) -> None:
        self._moment: tuple[int, int] | None = None
        self._here: Callable[[], Snapshot]
        """Function that returns the state of the recorded moment. It is undefined while `_moment` is None."""

    def note(self, trainer: Trainer) -> None:
        """Record the current step and epoch. Call this after each step, before any call that a death may interrupt."""
        if not survivable():
            return
        buffers = [x.copy() for x in trainer.model.module.buffers()]
        self._moment = trainer.step, trainer.epoch
        self._here = functools.partial(_back, trainer, trainer.train_loader.state_dict(), buffers)

    def farthest(self) -> Snapshot | None:
        """Return the state of the rank that has made the most steps, or None if no rank has recorded one.

        All ranks that go on after a death call this together. The state becomes this rank's restore point, too.
        """
        source = elastic.farthest(self._moment)
        if source is None:
            return None
        found: Snapshot = state_from(source, self._here() if dist.get_rank() == source else None)
        self._here = lambda: found
        self._moment = found[0]["step"], found[0]["epoch"]
        return found


def _back(trainer: Trainer, position: dict[str, Any], buffers: list[Array]) -> Snapshot:
    trainer.train_loader.load_state_dict(position)
    for x, kept in zip(trainer.model.module.buffers(), buffers, strict=True):
        x[...] = kept
    return trainer.state_dict(), [trainer.own_state()]
