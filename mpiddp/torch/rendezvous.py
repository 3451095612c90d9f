"""The rendezvous of torch's ``init_process_group``: store, rank and number of ranks from MPI."""

import atexit
import functools
import multiprocessing
import os
import re
import sys
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
"""TORCHELASTIC_RUN_ID under ``python -m mpiddp.torch``."""
_SCHEMES = ("env", "tcp", "file")

_latest: Any = None


def meet(
    url: str, timeout: timedelta = timedelta(minutes=30), listens: bool = True, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Give torch a store, this process's rank, and the number of ranks; all ranks call.

    ``listens`` says that the group to be made needs the store.
    """
    from . import default, store  # slow: `import torch` would wait for it

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
    """Let the remaining ranks meet in the store of the first of them; all of them call."""
    if _latest is not None:
        _latest.announce(listens=False)


def install() -> None:
    """Let "mpiddp" meet through MPI, whatever address the program or the environment names.

    Under an MPI launcher other backends meet through MPI, too, if the environment names no address. ``mpi://`` always
    means MPI.
    """
    for scheme in ("mpi", *_SCHEMES):
        handlers[scheme] = functools.partial(_meet_or, handlers.get(scheme, meet))


def prefer_mpi() -> None:
    """Let every backend meet through MPI: addresses are there for scripts that read them."""
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
    """Return the backend that the program asks for, which torch does not tell its handlers."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "init_process_group":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return str(frame.f_locals["backend"])


def _address(url: str) -> str:
    if not url.startswith("env:"):
        return url.partition("?")[0]
    return " ".join(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ)


def _refuse_spawned(launch: launchers.Launch) -> None:
    """End the job if a script for torchrun starts ranks of its own: they would meet on Gloo, or not at all.

    A rank that has its group may start processes that have another one, as to write checkpoints.
    """
    starter = multiprocessing.parent_process()
    by_runner = os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID
    if by_runner and starter is not None and rank_process.started_by_rank() is None:
        child_processes.refuse_spawned(launch, starter, multiprocessing.current_process())


def _watch_for_gloo(launch: launchers.Launch, backend: str | None) -> None:
    """Let rank 0 say at the end that this job ran on Gloo, unless it uses mpiddp too or torchrun has started it."""
    on_gloo = backend in ("gloo", "undefined") and not torch.cuda.is_available()
    is_rank = launchers.rank_variables().get("WORLD_SIZE") == launch.size and rank_process.started_by_rank() is None
    if on_gloo and is_rank and launch.rank == 0 and not {"mpiddp.distributed", *_USES} & sys.modules.keys():
        atexit.register(_mention_gloo)


_USES = ("mpiddp.torch.process_group", "mpiddp.parallel")
"""Modules that are imported where a program makes a torch group on MPI, or uses mpiddp beside torch."""


def _mention_gloo() -> None:
    if not set(_USES) & sys.modules.keys():
        abort.say(
            "torch.distributed ran on Gloo in this job, though mpiddp is installed: start it with"
            ' `mpirun ... python -m mpiddp.torch`, or call init_process_group("mpiddp") first, to run it on MPI'
        )
