"""``Checkpointer`` saves and resumes the checkpoints of a run, on all ranks; ``RestorePoint`` needs no files."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import IO, Any

import mpiddp.distributed as dist
from mpiddp import elastic
from mpiddp.distributed.shrink import survivable
from mpiddp.serialization import WRITER, encode_arrays, temporary_name, write_synced
from mpiddp.typing import Array

from . import reproducibility
from .build import group_options
from .checkpoint import Checkpoint, CheckpointStore, file_entry, shard_name
from .config import Config
from .console import say
from .options import RunError, UsageError, refusing
from .ranks import arrays_from, broadcasted, gathered, raise_on_all_ranks
from .run_folder import locked
from .trainer import Trainer

_MUST_AGREE = ("model", "data", "seed", "optimizer")

_logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and resumes a run's checkpoints; every rank calls the same methods."""

    def __init__(self, config: Config, versions: Mapping[str, str] | None = None) -> None:
        assert config.output is not None
        self._config = config
        self._versions = dict(versions or {})
        self._store = CheckpointStore(config.output / "checkpoints", config.keep)
        """Used by rank 0, which may be another process after a death."""
        self._lock: IO[str] | None = None
        self._saved: tuple[int, int] | None = None

    def claim(self) -> None:
        """Lock the output folder, and mend the remains of dead runs, on rank 0.

        BlockingIOError: another run holds it; UsageError: it holds checkpoints, and the configuration does not resume.
        """
        self._reclaim()
        if dist.get_rank() == 0 and self._config.resume == "no" and self._store.steps():
            raise UsageError(
                f"{self._store.folder} holds checkpoints of an earlier run: --resume auto goes on with it, another"
                " --output (or removing that folder) begins anew"
            )

    def save(self, trainer: Trainer) -> None:
        """Save in the background, unless this moment is saved; rank 0 logs failures, `finish` raises the last.

        The score is the accuracy of the last epoch, if the model is still the one that was tested.
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
            self._store.save(Checkpoint(trainer.arrays(), state), shards)

    def finish(self) -> None:
        """Wait for the disk; RunError on all ranks if the last checkpoint could not be written."""
        written = refusing("the last checkpoint could not be written (", OSError, by=RunError, after=")")
        raise_on_all_ranks(written(self._store.finish), RunError)

    def regroup(self, trainer: Trainer) -> None:
        """Continue with the surviving ranks, from a checkpoint of this moment."""
        self._saved = None
        self._finish_previous()
        raise_on_all_ranks(self._reclaim)
        self.save(trainer)  # the pending one may have died with its writer

    def _reclaim(self) -> None:
        if dist.get_rank() == 0:
            self._lock = self._lock or locked(self._store.folder.parent)
            self._store.tidy()

    def _finish_previous(self) -> None:
        try:
            self._store.finish()
        except OSError as error:
            _logger.warning("the previous checkpoint could not be written (%s); training goes on", error)

    def _write_shards(self, trainer: Trainer) -> dict[str, Any]:
        """Write this rank's arrays, if it has some; return all shards' entries for the manifest by their names."""
        own, entry = trainer.own_arrays(), None
        # Rank 0 tells its name when it has finished the previous checkpoint, so no shard gets into that one's folder.
        pending = temporary_name(self._store.path(trainer.step), writer=broadcasted(WRITER, 0))
        if own:
            content = encode_arrays(own)
            try:
                pending.mkdir(parents=True, exist_ok=True)
                write_synced(pending / shard_name(dist.get_rank()), content)
                entry = file_entry(content)
            except OSError as error:
                entry = {"fault": f"rank {dist.get_rank()}: {error}"}
        return {shard_name(rank): each for rank, each in enumerate(gathered(entry)) if each is not None}

    def resume(self, trainer: Trainer) -> None:
        """Continue from the newest whole checkpoint, if asked for and there; rank 0 reads.

        UsageError, on every rank, for another model, data or seed, or if all are damaged.
        """
        if self._config.resume == "no":
            return
        found = raise_on_all_ranks(self._newest)
        state = broadcasted(found.state if found else None, 0)
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
        arrays = dict(arrays_from(0, found.arrays if found else {}))
        for rank in range(ranks):
            shard = found.shards.get(rank, {}) if found else {}
            arrays |= arrays_from(0, shard, functools.partial(trainer.wants, rank=rank, ranks=ranks))
        fits = refusing(
            "the checkpoint to resume from is not one of this model and these data: ",
            *(RuntimeError, ValueError),
            after="; give those that it was made with, or another --output",
        )
        raise_on_all_ranks(functools.partial(fits(trainer.load_state_dict), state, arrays))
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
            # Not begun anew: a file system in trouble must not throw days of work away.
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
        del old["lr"]  # the checkpoint's is the schedule's
    if trainer.scheduler is not None:
        del new["lr"]  # which the schedule sets
    for group in trainer.optimizer.param_groups:
        group |= {name: value for name, value in new.items() if value != old.get(name)}


Snapshot = tuple[dict[str, Any], dict[str, Array]]
"""The arguments of `Trainer.load_state_dict`."""


class RestorePoint:
    """The last moment (steps and epochs made) at which this rank's state was whole, and the way back to it.

    Parameters and the optimizer's state need no copy: only the optimizer's step changes them, and it waits for no other
    rank. A forward changes buffers, and the loader moves on, so these are copied here. Dropout follows from the number
    of the step. A communication hook's memory is taken from the most advanced rank.
    """

    def __init__(self) -> None:
        self._moment: tuple[int, int] | None = None
        self._here: Callable[[], Snapshot]
        """Goes back to the moment, if there is one, and returns the state."""

    def note(self, trainer: Trainer) -> None:
        """Record this moment, before anything that may fail."""
        if not survivable():
            return
        buffers = [x.copy() for x in trainer.model.module.buffers()]
        self._moment = trainer.step, trainer.epoch
        self._here = functools.partial(_back, trainer, trainer.train_loader.state_dict(), buffers)

    def farthest(self) -> Snapshot | None:
        """Return the state of the most advanced rank, from now on this rank's too; None without one; collective."""
        source = elastic.farthest(self._moment)
        if source is None:
            return None
        state, arrays = self._here() if dist.get_rank() == source else ({}, {})
        found = broadcasted(state, source), dict(arrays_from(source, arrays))
        self._here = lambda: found
        self._moment = found[0]["step"], found[0]["epoch"]
        return found


def _back(trainer: Trainer, position: dict[str, Any], buffers: list[Array]) -> Snapshot:
    trainer.train_loader.load_state_dict(position)
    for x, kept in zip(trainer.model.module.buffers(), buffers, strict=True):
        x[...] = kept
    return trainer.common_state(), trainer.arrays() | trainer.own_arrays()
