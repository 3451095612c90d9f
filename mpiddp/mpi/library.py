"""Facts of the MPI library, by the beginning of its name."""

from typing import NamedTuple


class Library(NamedTuple):
    """Facts in which MPI libraries differ."""

    survives_deaths: bool = False
    """It has ULFM: ranks may go on when one fails."""
    queues_device_collectives: bool = True
    """If it takes device pointers, its non-blocking collectives take them, too."""
    overruns_receives: bool = False
    """A message that is too long for its receive may be written to the memory behind it, and only then be an error."""
    starts_fast_one_by_one: bool = False
    """Short messages come faster if persistent receives are started one by one, each after the message before."""
    vouches_for_its_transport: bool = True
    """If it says that it takes device pointers, all that may carry its messages does."""


_OPEN_MPI = Library(
    survives_deaths=True,
    queues_device_collectives=False,
    overruns_receives=True,
    starts_fast_one_by_one=True,
    vouches_for_its_transport=False,
)


def facts(name: str) -> Library:
    return _OPEN_MPI if name.startswith("Open MPI") else Library()


def short_name(version: str) -> str:
    """Return name and number from the text of MPI_Get_library_version."""
    return " ".join(version.split("\n")[0].split(",")[0].replace("Version:", "").split())
