"""mpiddp's own errors, and the exit codes of jobs that it ends.

Where torch raises a ``ValueError``, ``TypeError`` or ``RuntimeError``, mpiddp raises that class with torch's text; the
classes here are for what torch has no word for, and each is also the built-in class that a caller would catch.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_TIMEOUT = 110
"""Exit code of a job ended because an operation did not finish in time."""
EXIT_MISMATCH = 111
"""Exit code of a job ended because ranks disagree about their operation."""
EXIT_INTERRUPTED = 130
"""Exit code of a job that a Ctrl-C ended."""
EXIT_CHECKPOINTED = 75
"""Exit code of a training run that saved a checkpoint on a signal and wants to be started again (``EX_TEMPFAIL``)."""


class DistError(RuntimeError):
    """Something is wrong with the job: its launcher, its MPI library, its groups (torch: ``DistError``)."""


class SetupError(DistError):
    """A launch that cannot work; rank 0 alone prints it."""


DistBackendError = DistError
"""torch's name for an error of a backend: here any error of the job."""


class ArrayError(DistError, ValueError):
    """An array cannot be communicated as it is: shape, dtype, layout or flags. The text names the cure."""


class MismatchError(DistError):
    """Ranks disagree about their operation; the text names both sides.

    ``ranks`` disagree, by their numbers in the world, as far as this rank knows.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class DistTimeoutError(DistError, TimeoutError):
    """An operation did not finish in time; the text names it, its group and the ranks that are missing."""


class RankFailedError(DistError):
    """Ranks failed, and this one may go on without them: see ``shrink_group``.

    ``ranks`` are their numbers in the world that they were in, as far as this rank knows.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)  # without the ranks, which a pickled error gets back all the same
        self.ranks = list(ranks)
