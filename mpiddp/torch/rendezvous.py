"""The rendezvous of torch's ``init_process_group``: MPI tells torch the rank and the number of ranks."""

import atexit
import functools
import multiprocessing
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
from torch.distributed.rendezvous import _rendezvous_handlers as handlers

from mpiddp import launchers, rank_process
from mpiddp.faults import abort
from mpiddp.mpi import child_processes

from .errors import translated

RUN_ID = "mpiddp"
"""The value of TORCHELASTIC_RUN_ID in a job of ``python -m mpiddp.torch``."""
_SCHEMES = ("env", "tcp", "file")

_latest: Any = None


def meet(
    url: str, timeout: timedelta = timedelta(minutes=30), listens: bool = True, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield to torch a store, this process's rank, and the number of ranks. All ranks call this together.

    ``listens`` is True if the group that torch makes next needs the store.
    """
    from . import default, store  # slow imports, which at the top would delay `import torch`

    global _latest
    told = {name: int(numbers[0]) for name, numbers in parse_qs(urlparse(url).query).items()}
    with translated():
        group = default.begin(timeout, told.get("rank", -1), told.get("world_size", -1))
        rank_process.claim_rank()
        _latest = store.Store(timeout)
        _latest.announce(listens)
    yield _latest, group.rank(), group.size()
    raise RuntimeError("ranks of an MPI job do not change: there is no second rendezvous")


def renew() -> None:
    """Let the ranks that remain after a shrink use the store of the first of them. They call this together."""
    if _latest is not None:
        _latest.announce(listens=False)


def install() -> None:
    """Replace torch's rendezvous handlers, so that the ranks of a group of backend "mpiddp" find each other by MPI.

    An address that the program or the environment names is then ignored, with a warning. Under an MPI launcher, ranks
    of other backends find each other by MPI, too, if neither the program nor the environment names an address. The
    address ``mpi://`` always means MPI.
    """
    for scheme in ("mpi", *_SCHEMES):
        handlers[scheme] = functools.partial(_meet_or, handlers.get(scheme, meet))


def prefer_mpi() -> None:
    """Let the ranks of every backend find each other by MPI, in a job of ``python -m mpiddp.torch``.

    The address in the environment is only for scripts that read it.
    """
    for scheme in _SCHEMES:
        handlers[scheme] = functools.partial(meet, listens=False)


def _meet_or(original: Callable[..., Iterator[Any]], url: str, **options: Any) -> Iterator[Any]:
    launch, backend = launchers.launch(), _backend()
    by_address = "MASTER_ADDR" in os.environ if url.startswith("env:") else not url.startswith("mpi:")
    if "mpiddp" in re.split("[:,]", backend or ""):
        if by_address and (launch is None or launch.rank == 0):
            warnings.warn(f'the ranks of "mpiddp" meet through MPI, not at {_address(url)}', stacklevel=7)
        return meet(url, **options, listens=backend != "mpiddp")
    if launch is not None and launch.size > 1:
        _refuse_spawned(launch)
        _watch_for_gloo(launch, backend)
    return original(url, **options) if by_address or launch is None else meet(url, **options)


def _backend() -> str | None:
    """Return the backend that the program names in ``init_process_group``, or None.

    torch does not tell rendezvous handlers the name, so it is read from the calling frames.
    """
    callers = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "init_process_group")
    found = next(callers, None)
    return None if found is None else str(found.f_locals["backend"])


def _address(url: str) -> str:
    if not url.startswith("env:"):
        return url.partition("?")[0]
    return " ".join(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ)


def _refuse_spawned(launch: launchers.Launch) -> None:
    """End the job if a script in a job of ``python -m mpiddp.torch`` starts ranks of its own as child processes.

    Such child processes would form a group on Gloo, or none at all. A rank that has initialised its group may start
    child processes that have another group, such as those that write checkpoints.
    """
    starter = multiprocessing.parent_process()
    by_runner = os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID
    if by_runner and starter is not None and rank_process.started_by_rank() is None:
        child_processes.refuse_spawned(launch, starter, multiprocessing.current_process())


def _watch_for_gloo(launch: launchers.Launch, backend: str | None) -> None:
    """Let rank 0 print at its end that this job ran on Gloo although mpiddp is installed.

    Nothing is printed if the job uses mpiddp, too, or if torchrun started the ranks.
    """
    on_gloo = backend in ("gloo", "undefined") and not torch.cuda.is_available()
    is_rank = launchers.rank_variables().get("WORLD_SIZE") == launch.size and rank_process.started_by_rank() is None
    if on_gloo and is_rank and launch.rank == 0 and not {"mpiddp.distributed", *_USES} & sys.modules.keys():
        atexit.register(_mention_gloo)


_USES = ("mpiddp.torch.process_group", "mpiddp.parallel")
"""If one of these modules is imported, the program has made a torch group on MPI, or uses mpiddp beside torch."""


def _mention_gloo() -> None:
    if not set(_USES) & sys.modules.keys():
        abort.say(
            "torch.distributed ran on Gloo in this job, though mpiddp is installed: start it with"
            ' `mpirun ... python -m mpiddp.torch`, or call init_process_group("mpiddp") first, to run it on MPI'
        )
