"""Facts about MPI libraries, which are told apart by the beginning of their names."""

from typing import NamedTuple


class Library(NamedTuple):
    """Facts in which MPI libraries differ."""

    survives_deaths: bool = False
    """True if the library has ULFM, so that ranks may go on when one fails."""
    queues_device_collectives: bool = True
    """True if non-blocking collectives take device pointers wherever blocking ones do."""
    overruns_receives: bool = False
    """True if the library may write a message that is too long to the memory behind the receive's buffer, and report
    the error only after that."""
    starts_fast_one_by_one: bool = False
    """True if short messages come faster when persistent receives are started one by one, each after the message of the
    one before has come."""
    vouches_for_its_transport: bool = True
    """True if the library's claim to take device pointers holds for every transport that may carry its messages."""


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
    """Return the library's name and version number from the text of MPI_Get_library_version."""
    return " ".join(version.split("\n")[0].split(",")[0].replace("Version:", "").split())
