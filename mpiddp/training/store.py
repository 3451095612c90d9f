"""``CheckpointStore``: a run's checkpoints in a folder, written in the background; the last and the best are kept."""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mpiddp.serialization import temporary_name

from .checkpoint import Checkpoint, DamagedError, read_checkpoint, read_score
from .files import put_back, remove_folders, sweep
from .parts import AwaitedParts

_NAME = re.compile(r"step-(\d+)")


class CheckpointStore:
    """Checkpoints by their step, in folders ``step-0000000123``. For one process only, normally rank 0.

    Parameters
    ----------
    folder : Path
        Where they are; made when the first is saved.
    keep : int, default 3
        How many of the newest to keep; the one with the best score stays besides.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"a CheckpointStore keeps at least 1 checkpoint, got keep={keep}")
        self.folder = folder
        self.keep = keep
        self._scores: dict[int, float | None] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mpiddp-checkpoint")
        self._writing: Future[None] | None = None
        self._pending = folder  # of what is being written

    def tidy(self) -> None:
        """Put back what writers that died have moved aside, and remove what else they have left."""
        if self.folder.is_dir():
            put_back(self.folder)
            sweep(self.folder)

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, whole or damaged, in order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(name[1]) for name in found if name)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / self.name(step)

    @staticmethod
    def name(step: int) -> str:
        """Return what the folder of a step's checkpoint is called."""
        return f"step-{step:010d}"

    def save(self, checkpoint: Checkpoint, awaited: AwaitedParts | None = None) -> None:
        """Write a checkpoint in the background; what is saved is what its arrays hold now.

        Waits for the one before, and raises its OSError if it could not be written.

        Parameters
        ----------
        checkpoint : Checkpoint
            What to save.
        awaited : AwaitedParts, optional
            Parts that other processes put into the folder under its temporary name.
        """
        self.finish()
        self._pending = temporary_name(self.path(checkpoint.step))
        self._writing = self._pool.submit(self._write, checkpoint.frozen(), awaited)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. To be called when all of its parts are there, or given up.

        Raises
        ------
        OSError
            If it could not be written; those before it are still there.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            finally:
                # A part may have come after the writer had given up, and removed those before it.
                remove_folders([self._pending])

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that is whole, or None, and what is wrong with each newer one.

        Raises
        ------
        NewerFormatError
            If one before it is not for this mpiddp to read.
        """
        put_back(self.folder)
        faults: list[str] = []
        for step in reversed(self.steps()):
            try:
                return read_checkpoint(self.path(step)), faults
            except DamagedError as error:
                faults.append(str(error))
        return None, faults

    def _write(self, checkpoint: Checkpoint, awaited: AwaitedParts | None) -> None:
        checkpoint.write(self.path(checkpoint.step), awaited)
        self._scores[checkpoint.step] = checkpoint.score
        self._prune(checkpoint.step)

    def _prune(self, last: int) -> None:
        """Remove what is neither among the newest nor the best, and what writers that died have left."""
        # Those beyond are damaged, or this run would have begun with them: they are no reason to remove a whole one.
        steps = [step for step in self.steps() if step <= last]
        self._scores = {step: score for step, score in self._scores.items() if step in steps}
        kept = set(steps[-self.keep :])
        scored = {step: score for step in steps if (score := self._score(step)) is not None}
        if scored:
            kept.add(max(scored, key=lambda step: (scored[step], step)))
        remove_folders(self.path(step) for step in steps if step not in kept)
        sweep(self.folder)

    def _score(self, step: int) -> float | None:
        """Return the score of a checkpoint, from the disk where another run has written it."""
        if step not in self._scores:
            try:
                self._scores[step] = read_score(self.path(step))
            except DamagedError:
                self._scores[step] = None
        return self._scores[step]
