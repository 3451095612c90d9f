"""``Keeper``: a run's checkpoints, as every rank sees them. Rank 0 alone reads and writes files."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import mpiddp.distributed as dist
from mpiddp import settings
from mpiddp.mpi.library import MPI
from mpiddp.typing import Array

from .checkpoint import Checkpoint
from .config import Config, UsageError
from .files import write_whole
from .revision import commit_of
from .store import CheckpointStore
from .together import together
from .trainer import Trainer

_MUST_AGREE = ("model", "data", "seed")
"""Options without which a checkpoint means nothing."""
_GROUP_OPTIONS = ("lr", "momentum")
"""Options of the optimizer: where they differ from the checkpoint's, the new ones hold."""

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
        self._store = CheckpointStore(config.output / "checkpoints", config.keep) if first else None
        self._saved: tuple[int, int] | None = None

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
        if self._store is None:
            return
        if self._config.resume == "no" and self._store.steps():
            raise UsageError(
                f"{self._store.folder} holds checkpoints of an earlier run: --resume auto goes on with it, another"
                " --output (or removing that folder) begins anew"
            )
        write_whole(self._output / "config.json", self._config.as_json().encode())
        commits = {"mpiddp": commit_of(Path(__file__)), "working directory": commit_of(Path.cwd())}
        described = {**surroundings, "commits": commits, "started": datetime.now(UTC).isoformat(timespec="seconds")}
        write_whole(self._output / "run.json", (json.dumps(described, indent=1) + "\n").encode())

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
        state = trainer.state_dict() | {"score": score, "config": self._config.as_dict(), "bits": _what_decides_bits()}
        if self._store is None:
            return
        try:
            self._store.save(Checkpoint(trainer.arrays(), state))
        except OSError as error:
            _logger.warning("the previous checkpoint could not be written (%s); training goes on", error)

    def finish(self) -> None:
        """Wait until the last checkpoint is written.

        Raises
        ------
        OSError
            On rank 0, if it could not be.
        """
        if self._store is not None:
            self._store.finish()

    def resume(self, trainer: Trainer) -> None:
        """Go on from the newest whole checkpoint, if the configuration says so and there is one. Every rank calls it.

        Raises
        ------
        UsageError
            If it is one of another model, other data or another seed.
        """
        if self._config.resume == "no":
            return
        found = together(self._newest)
        state, arrays = _from_first_rank(found)
        if state is None:
            return
        _check(state["config"], self._config)
        trainer.load_state_dict(state, arrays)
        for group in trainer.optimizer.param_groups:
            for option in _GROUP_OPTIONS:
                if state["config"][option] != getattr(self._config, option):
                    group[option] = getattr(self._config, option)
        self._saved = (trainer.epoch, trainer.step)
        if self._store is not None:
            print(
                f"resumed after step {trainer.step}, in epoch {trainer.epoch + 1}, from {self._store.folder}",
                flush=True,
            )
            for name, then in state["bits"].items():
                if (now := _what_decides_bits()[name]) != then:
                    said = "%s was %s and is %s: the last bits of results may differ from an unbroken run's"
                    _logger.warning(said, name, then, now)

    def _newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint on rank 0, and warn of damaged ones."""
        if self._store is None:
            return None
        checkpoint, faults = self._store.newest()
        for fault in faults:
            _logger.warning("skipped a damaged checkpoint: %s", fault)
        return checkpoint


def _check(then: Mapping[str, Any], config: Config) -> None:
    """Refuse a checkpoint of another problem."""
    for name in _MUST_AGREE:
        if then[name] != getattr(config, name):
            raise UsageError(
                f"the checkpoint to resume from was made with {name}={then[name]}, this run has"
                f" {name}={getattr(config, name)}; give the same, or another --output"
            )


def _what_decides_bits() -> dict[str, Any]:
    """Return what the last bits of results depend on, besides what a checkpoint restores."""
    return {
        "ranks": dist.get_world_size(),
        "BLAS threads": settings.blas_threads(),
        "MPIDDP_DETERMINISTIC": settings.deterministic(),
        "NumPy": np.__version__,
        "MPI library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "machine": platform.machine(),
    }


def _from_first_rank(checkpoint: Checkpoint | None) -> tuple[dict[str, Any] | None, dict[str, Array]]:
    """Return state and arrays of rank 0's checkpoint on every rank; only rank 0 needs to see its files."""
    layout = {name: (x.shape, x.dtype.str) for name, x in checkpoint.arrays.items()} if checkpoint else {}
    told: list[Any] = [checkpoint.state if checkpoint else None, layout]
    dist.broadcast_object_list(told, src=0)
    state, layout = told
    arrays = {}
    for name, (shape, dtype) in layout.items():
        arrays[name] = checkpoint.arrays[name].copy() if checkpoint else np.empty(shape, dtype)
        dist.broadcast(arrays[name], src=0)
    return state, arrays
