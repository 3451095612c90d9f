"""mpiddp's own errors, and the exit codes of jobs that it ends.

In most cases in which torch raises a ``ValueError``, ``TypeError`` or ``RuntimeError``, mpiddp raises the same class
with torch's text. ``mpiddp/distributed/README.md`` lists the differences. The classes in this module are for faults of
the job, such as a rank that dies, and for arrays that cannot be sent. All are RuntimeErrors. `ArrayError` is also a
``ValueError``, and `DistTimeoutError` a ``TimeoutError``.
"""

from collections.abc import Sequence

EXIT_TIMEOUT = 110
"""Exit code of a job ended because an operation did not finish in time, or a rank gave no sign of life."""
EXIT_MISMATCH = 111
"""Exit code of a job ended because ranks disagree about their operation."""
EXIT_INTERRUPTED = 130
"""Exit code of a job that a Ctrl-C ended. Open MPI's mpirun returns 1 instead."""
EXIT_CHECKPOINTED = 75
"""Exit code of a training run that has saved a checkpoint on a signal and can be started again (``EX_TEMPFAIL``)."""


class DistError(RuntimeError):
    """The base class of the errors in this module. torch has a class of that name.

    If it is raised itself, something is wrong with the job: its launcher, its MPI library or its groups.
    """


class SetupError(DistError):
    """The job was started in a way that cannot work. If the ranks do not catch this error, only rank 0 prints it."""


DistBackendError = DistError
"""torch's name for an error of a backend. Here it is another name of `DistError`."""


class ArrayError(DistError, ValueError):
    """An array cannot be sent or received as it is. The text says why, and what to do."""


class _RanksError(DistError):
    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)  # pickle restores the ranks from the object's dictionary
        self.ranks = list(ranks)


class MismatchError(_RanksError):
    """Ranks have made different calls where all ranks must make the same call, or their data differ.

    The text names both calls, if they are known, or the data. After different calls the attribute ``ranks`` lists the
    ranks that disagree, as far as this rank knows, by their numbers in the world. Otherwise it is empty.
    """


class DistTimeoutError(DistError, TimeoutError):
    """An operation did not finish in time; the text names it and, if they are known, the ranks that are missing."""


class RankFailedError(_RanksError):
    """Ranks have died or left the group. This rank may go on without them: see ``shrink_group``.

    The attribute ``ranks`` lists the lost ranks, as far as this rank knows, by the numbers that they had before
    `shrink_group` numbers the ranks anew.
    """
