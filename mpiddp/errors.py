"""mpiddp's own errors, and the exit codes of jobs that it ends.

If torch raises a ``ValueError``, ``TypeError`` or ``RuntimeError``, mpiddp raises the same class with torch's text. The
classes in this module are for errors that torch does not have. Each is also the built-in class that a caller would
catch.
"""

from collections.abc import Sequence

EXIT_TIMEOUT = 110
"""Exit code of a job ended because an operation did not finish in time."""
EXIT_MISMATCH = 111
"""Exit code of a job ended because ranks disagree about their operation."""
EXIT_INTERRUPTED = 130
"""Exit code of a job that a Ctrl-C ended."""
EXIT_CHECKPOINTED = 75
"""Exit code of a training run that has saved a checkpoint on a signal and can be started again (``EX_TEMPFAIL``)."""


class DistError(RuntimeError):
    """Something is wrong with the job: its launcher, its MPI library or its groups. torch has a class of that name."""


class SetupError(DistError):
    """The job was started in a way that cannot work. Only rank 0 prints this error."""


DistBackendError = DistError
"""torch's name for an error of a backend. In mpiddp it means any error of the job."""


class ArrayError(DistError, ValueError):
    """An array cannot be sent or received as it is. The text says why, and what to do."""


class _RanksError(DistError):
    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)  # pickle restores the ranks from the object's dictionary
        self.ranks = list(ranks)


class MismatchError(_RanksError):
    """Ranks have made different calls where all ranks must make the same call. The text names both calls.

    The attribute ``ranks`` lists the ranks that disagree, as far as this rank knows, by their numbers in the world.
    """


class DistTimeoutError(DistError, TimeoutError):
    """An operation did not finish in time; the text names it, its group and the ranks that are missing."""


class RankFailedError(_RanksError):
    """Ranks have died or left the group. This rank may go on without them: see ``shrink_group``.

    The attribute ``ranks`` lists the lost ranks, as far as this rank knows, by their numbers in the world before.
    """
