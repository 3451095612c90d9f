"""``Keeper``: a run's checkpoints, as every rank sees them.

Rank 0 alone reads and writes files, but for what other ranks alone hold: they write it themselves (see `parts`).
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mpiddp.distributed as dist
from mpiddp.serialization import WRITER, encode_arrays, temporary_name, write_atomically
from mpiddp.typing import Array

from . import bits
from .building import group_options
from .checkpoint import Checkpoint, frozen_arrays
from .config import Config, UsageError
from .files import sweep
from .lock import RunLock
from .parts import AwaitedParts, write_part
from .report import say
from .revision import commit_of
from .store import CheckpointStore
from .together import arrays_of, together
from .trainer import Trainer

_MUST_AGREE = ("model", "data", "seed", "optimizer")
"""Options without which a checkpoint means nothing."""

_logger = logging.getLogger(__name__)


class Keeper:
    """Saves checkpoints after epochs and steps, and resumes from them. Every rank has one and calls the same.

    Parameters
    ----------
    config : Config
        Has ``output``.
    first : bool
        Whether this is rank 0.
    """

    def __init__(self, config: Config, first: bool) -> None:
        assert config.output is not None
        self._config = config
        self._output = config.output
        self._folder = config.output / "checkpoints"
        self._store = CheckpointStore(self._folder, config.keep) if first else None
        self._lock: RunLock | None = None
        self._saved: tuple[int, int] | None = None
        self._versions: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mpiddp-part")
        self._part: Future[None] | None = None
        # Of the checkpoint that is being written; None, on all ranks, if it has no parts.
        self._awaited: AwaitedParts | None = None

    def claim(self) -> None:
        """Take the output folder for this run alone, and mend what runs that died have left of their checkpoints.

        Raises
        ------
        BlockingIOError
            If another run is at work there.
        """
        if self._store is not None:
            self._lock = RunLock(self._output)
            self._store.tidy()

    def prepare(self, surroundings: Mapping[str, Any]) -> None:
        """Write configuration and surroundings into the output folder; refuse to mix a new run with an old one.

        Parameters
        ----------
        surroundings : mapping
            What `environment.collect` returns.

        Raises
        ------
        UsageError
            If there are checkpoints, and the configuration does not resume.
        """
        self._versions = surroundings.get("versions", {})
        if self._store is None:
            return
        if self._config.resume == "no" and self._store.steps():
            raise UsageError(
                f"{self._store.folder} holds checkpoints of an earlier run: --resume auto goes on with it, another"
                " --output (or removing that folder) begins anew"
            )
        self._output.mkdir(parents=True, exist_ok=True)
        sweep(self._output)
        write_atomically(self._output / "config.json", self._config.as_json().encode())
        commits = {"mpiddp": commit_of(Path(__file__)), "working directory": commit_of(Path.cwd())}
        described = {**surroundings, "commits": commits, "started": datetime.now(UTC).isoformat(timespec="seconds")}
        write_atomically(self._output / "run.json", (json.dumps(described, indent=1) + "\n").encode())

    def step_end(self, trainer: Trainer) -> None:
        """Save after every so many steps."""
        if self._config.checkpoint_steps and trainer.step % self._config.checkpoint_steps == 0:
            self.save(trainer)

    def epoch_end(self, trainer: Trainer) -> None:
        """Save after every epoch, with the accuracy as score."""
        self.save(trainer, score=trainer.history[-1].accuracy)

    def save(self, trainer: Trainer, score: float | None = None) -> None:
        """Save a checkpoint in the background, unless there is one of this moment. Every rank calls it."""
        if self._saved == (trainer.epoch, trainer.step):
            return
        self._saved = (trainer.epoch, trainer.step)
        state = trainer.state_dict() | {
            "score": score,
            "config": self._config.as_dict(),
            "bits": bits.what_decides_bits(),
            "versions": self._versions,
        }
        try:
            self.finish()
        except OSError as error:
            _logger.warning("the previous checkpoint could not be written (%s); training goes on", error)
        own = trainer.own_arrays()
        # After rank 0 has finished the one before: no part of this one comes into the folder of that.
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, (bool(own), WRITER))
        owners = [rank for rank, (has_own, _) in enumerate(said) if has_own]
        self._awaited = AwaitedParts(owners) if owners else None
        if own:
            name = CheckpointStore.name(trainer.step)
            pending = temporary_name(self._folder / name, writer=said[0][1])
            frozen = frozen_arrays(own)
            self._part = self._pool.submit(lambda: write_part(pending, dist.get_rank(), encode_arrays(frozen)))
        if self._store is not None:
            self._store.save(Checkpoint(trainer.arrays(), state), self._awaited)

    def finish(self) -> None:
        """Wait until the last checkpoint is written. Every rank calls it.

        Raises
        ------
        OSError
            On rank 0, if it could not be.
        """
        if self._awaited is not None:
            self._awaited.tell(self._faults_of_parts())
            self._awaited = None
        if self._store is not None:
            self._store.finish()

    def _faults_of_parts(self) -> str | None:
        """Wait until all ranks are done with their parts, and return what has kept the first from it."""
        fault, part = None, self._part
        self._part = None
        if part is not None and (error := part.exception()) is not None:
            fault = f"rank {dist.get_rank()}: {error}"
        faults: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
        return next((each for each in faults if each is not None), None)

    def regroup(self, trainer: Trainer) -> None:
        """Go on with the ranks that live, after some have died, from a checkpoint of this moment. They all call it."""
        if self._awaited is not None:
            self._awaited.tell("a rank has died")
            self._awaited = None
        self._saved = self._part = None
        if self._store is not None:
            try:
                self._store.finish()
            except OSError as error:
                _logger.warning("the previous checkpoint could not be written (%s); training goes on", error)
        elif dist.get_rank() == 0:
            self._store = CheckpointStore(self._folder, self._config.keep)
        together(self._claim_anew)
        # The one that was being written, or was about to be, may have died with its writer.
        tested = bool(trainer.history) and not trainer.running["samples"]
        self.save(trainer, score=trainer.history[-1].accuracy if tested else None)

    def _claim_anew(self) -> None:
        if self._store is not None and self._lock is None:
            self.claim()

    def resume(self, trainer: Trainer) -> None:
        """Go on from the newest whole checkpoint, if the configuration says so and there is one. Every rank calls it.

        Raises
        ------
        UsageError
            On every rank: if it is one of another model, other data or another seed, or if none is whole of several.
        """
        if self._config.resume == "no":
            return
        found = together(self._newest)
        told = [found.state if found else None]
        dist.broadcast_object_list(told, src=0)
        (state,) = told
        if state is None:
            return
        _check(state["config"], self._config)
        ranks = state["bits"]["ranks"]
        # Only rank 0 needs to see its files.
        arrays = dict(arrays_of(0, found.arrays if found else {}))
        for rank in range(ranks):
            part = found.parts.get(rank, {}) if found else {}
            arrays |= arrays_of(0, part, functools.partial(trainer.wants, rank=rank, ranks=ranks))
        together(lambda: _load(trainer, state, arrays))
        before = Config.from_mapping(state["config"])
        then, now = group_options(before), group_options(self._config)
        if before.schedule != "constant" or before.warmup_steps:
            del then["lr"]  # the checkpoint's is the schedule's
        for group in trainer.optimizer.param_groups:
            # Where they differ from the checkpoint's, the new ones hold; a schedule has set its own learning rate.
            group |= {
                name: value
                for name, value in now.items()
                if value != then.get(name) and not (name == "lr" and trainer.scheduler is not None)
            }
        self._saved = (trainer.epoch, trainer.step)
        if self._store is not None:
            done, epochs = trainer.epoch, self._config.epochs
            where = f"in epoch {done + 1}" if done < epochs else f"with all {epochs} epochs done"
            say(f"resumed after step {trainer.step}, {where}, from {self._store.folder}")
            for difference in bits.differences(state["bits"]):
                said = "%s was %s and is %s: the last bits of results may differ from an unbroken run's"
                _logger.warning(said, *difference)

    def _newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint on rank 0, and warn of damaged ones."""
        if self._store is None:
            return None
        checkpoint, faults = self._store.newest()
        if checkpoint is None and faults:
            # Days of work, which one look through a file system in trouble must not throw away.
            raise UsageError(
                f"no checkpoint in {self._store.folder} is whole ({'; '.join(faults)}): mend that, or remove the folder"
                " to begin anew"
            )
        for fault in faults:
            _logger.warning("skipped a damaged checkpoint: %s", fault)
        return checkpoint


def _check(then: Mapping[str, Any], config: Config) -> None:
    """Refuse a checkpoint of another problem."""
    for name in _MUST_AGREE:
        if name in then and then[name] != getattr(config, name):
            raise UsageError(
                f"the checkpoint to resume from was made with {name}={then[name]}, this run has"
                f" {name}={getattr(config, name)}; give the same, or another --output"
            )


def _load(trainer: Trainer, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Let the trainer go on from a checkpoint; refuse one that does not fit."""
    try:
        trainer.load_state_dict(state, arrays)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"the checkpoint to resume from is not one of this model and these data: {error}; give those that it was"
            " made with, or another --output"
        ) from error
