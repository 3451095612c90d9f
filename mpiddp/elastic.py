"""Training that goes on when ranks fail, with spare ranks that take their places.

Open MPI's ``mpirun --with-ft ulfm`` lets ranks live on when one is killed. `run` then returns to its last copy of the
state, and repeats the steps that were made since. The last ``spares`` ranks sleep until another rank fails, and then
one of them takes its place. So the world keeps its size, and batches, sums and bits stay the same. Without a spare the
survivors go on with fewer ranks.
"""

import copy
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

import mpiddp.distributed as dist
from mpiddp.distributed import groups, init
from mpiddp.distributed.backends import backend_of
from mpiddp.errors import EXIT_TIMEOUT, DistError
from mpiddp.faults import this_job
from mpiddp.faults.abort import abort, time_limit
from mpiddp.faults.job import Job
from mpiddp.faults.leaving import Neighbour
from mpiddp.faults.liveness import Tag
from mpiddp.mpi.lazy import MPI

__all__ = ["Stateful", "run"]

T = TypeVar("T")

_LOOK_S = 0.01
NEEDED = "start with Open MPI's `mpirun --with-ft ulfm` (`python -m mpiddp info` tells what becomes of the others)"
_logger = logging.getLogger(__name__)


_SPARE = -1


class Change(NamedTuple):
    """The ranks of a run after a failure."""

    died: tuple[int, ...]
    """Ranks that failed and left their places free. It is empty if only spares failed."""
    before: int
    size: int
    spares: int

    def __str__(self) -> str:
        if not self.died:
            return f"a spare died ({self.spares} left)"
        several = len(self.died) > 1
        who = f"rank{'s' * several} {', '.join(map(str, self.died))} of {self.before} died"
        filled = len(self.died) - (self.before - self.size)
        if not filled:
            return who
        taken = f"spares took {filled} of {len(self.died)} places" if several else "a spare took its place"
        return f"{who}; {taken} ({self.spares} left)"


class Stateful(Protocol):
    """The state of a script's training, such as models, optimizers, and positions in the data."""

    def state_dict(self) -> Any:
        """Return the state, equal on all ranks, as an object that can be pickled."""

    def load_state_dict(self, state: Any) -> object:
        """Continue from a state that `state_dict` has returned."""


def run(
    step: Callable[[Any, int], object], state: Callable[[], Stateful], steps: int, *, spares: int = 0, every: int = 1
) -> Any:
    """Make steps on all ranks but the spares, and repeat the last steps in a new world if a rank fails.

    All ranks call this after `init_process_group`, when no operation is pending. It handles ranks that are ended by a
    signal on nodes that live on; see `shrink_group`.

    Parameters
    ----------
    step : callable
        ``step(state, number)`` makes the step ``number``, counted from 0. Its random numbers must follow from number
        and rank, because the generators of a failed rank are lost.
    state : callable
        A function that makes the state, an object with ``state_dict`` and ``load_state_dict`` that is equal on all
        ranks between steps. After a failure it is called again on every rank, because groups, DDP and samplers belong
        to the world in which they were made.
    spares : int, default 0
        The number of spares. They are the last ranks, and wait to take the places of ranks that fail.
    every : int, default 1
        Steps between two copies of the state. A failure costs at most this many steps.

    Returns
    -------
    Stateful or None
        The state after the last step, or None on a spare that was not needed.

    Raises
    ------
    RankFailedError, DistError
        If MPI does not let ranks live on, and a rank failed or there are spares.
    ValueError
        If spares leave no rank, ``every`` is below 1, or the default group does not have all ranks.

    Examples
    --------
    >>> elastic.run(step, State, steps=1000, spares=1)  # doctest: +SKIP
    """
    if groups.default_group().size() != groups.default_group()._link.world.size:
        raise ValueError("elastic.run is for the group of all ranks; call init_process_group without comm")
    check_spares(spares)
    if every < 1:
        raise ValueError(f"every has to be at least 1 step, got {every}")
    copies = groups.default_group()._monitor.survivable
    kept: tuple[int, Any] | None = None
    final: Stateful | None = None

    def attempt(change: Change | None) -> None:
        nonlocal kept, final
        made, number = state(), 0
        if change is not None and (source := farthest(None if kept is None else kept[0])) is not None:
            told = [kept]
            dist.broadcast_object_list(told, src=source)
            assert told[0] is not None, "of a rank that has it"
            kept = told[0]
            number, saved = kept
            made.load_state_dict(copy.deepcopy(saved))
            if dist.get_rank() == 0:
                _logger.warning("%s; going on after step %d with %d ranks", change, number, change.size)
        for current in range(number, steps):
            if copies and (kept is None or current >= kept[0] + every):
                kept = current, copy.deepcopy(made.state_dict())
            step(made, current)
        final = made

    go_on(attempt, spares=spares)
    return final


def check_spares(spares: int) -> None:
    """Raise ValueError or DistError if a job of this size and launcher cannot have ``spares`` spares."""
    if spares and not groups.default_group()._monitor.survivable:
        raise DistError(f"spares need ranks that live on when one dies: {NEEDED}")
    if not 0 <= spares < MPI.COMM_WORLD.size:
        raise ValueError(f"spares leave no rank: {spares} of {MPI.COMM_WORLD.size} ranks; start more, or give less")


def farthest(moment: tuple[int, ...] | int | None) -> int | None:
    """Return the rank whose ``moment`` is greatest, or None if no rank has one. All ranks call this.

    ``moment`` is the progress of the state that this rank has kept, or None if it has none.
    """
    moments: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(moments, moment)
    known = [each for each in moments if each is not None]
    return moments.index(max(known)) if known else None


def go_on(
    attempt: Callable[[Change | None], T],
    *,
    prepare: Callable[[int], object] = lambda ranks: None,
    spares: int = 0,
    survivable: Callable[[], bool] = lambda: True,
) -> T:
    """Return ``attempt(change)``, and repeat the attempt in a new world whenever a rank fails meanwhile.

    ``attempt`` is called on all ranks but the spares, and these ranks are then the default group. ``change`` tells how
    a failure has changed the ranks; it is None as long as no rank has failed. Spares return the result of rank 0, which
    must be an object that can be pickled. ``prepare`` is called before an attempt with the number of ranks without
    spares, on all ranks, in a group of all ranks; once all ranks have completed it, it is not called again.
    ``survivable`` is called on each rank after a failure. If it returns False, the error is raised, and no new attempt
    is made.
    """
    places = _Places(spares)
    change: Change | None = None
    failed, changed = False, places.job.world.size < MPI.COMM_WORLD.size
    while True:
        if failed:
            places.regroup()
        try:
            if failed or changed:
                change = places.reassign()
            if not places.prepared:
                prepare(places.size)
                places.prepared = True
            places.take()
            outcome: T = places.wait() if places.slot is None else attempt(change)
            places.tell((outcome, None))
            with time_limit(places.timeout_s, "the end of elastic.run"):
                places.job.failures.agree()
            return outcome
        except Exception as error:
            if not places.job.failures.caused(error) or not survivable():
                places.tell((None, error))
                raise
            failed = True
        except SystemExit as ended:
            places.tell((None, ended))
            raise


class _Places:
    """The places of a run, and the ranks that hold them.

    ``slot`` is the place of this process, which is its rank in the run, or None for a spare. ``size`` is the number of
    places. ``prepared`` is True if this process has completed ``prepare``; after `reassign`, if all processes have.
    """

    def __init__(self, spares: int) -> None:
        link = groups.default_group()._link
        self.timeout_s, self._backend = link.timeout_s, backend_of(link)
        # COMM_WORLD has all ranks that the job started with, also ranks that have failed since.
        me, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - spares
        self.slot = me if me < self.size else None
        self.prepared = False

    @property
    def job(self) -> Job:
        job = this_job.current()
        assert job is not None, "there is a default group"
        return job

    def regroup(self) -> None:
        groups.discard()
        with time_limit(self.timeout_s, "recovery from a death"):
            this_job.regroup()

    def reassign(self) -> Change:
        """Give the places of failed ranks to spares. All survivors call this."""
        job = self.job
        with time_limit(self.timeout_s, "recovery from a death"):
            told = np.empty((job.world.size, 2), np.int64)
            job.world.comm.Allgather(
                np.array([_SPARE if self.slot is None else self.slot, self.prepared], np.int64), told
            )
            # The places change only after every survivor has received the same values.
            job.failures.agree()
            holders = [None if slot == _SPARE else slot for slot in told[:, 0].tolist()]
            free = [slot for slot in range(self.size) if slot not in holders]
            idle = [rank for rank, slot in enumerate(holders) if slot is None]
            for slot, rank in zip(free, idle, strict=False):
                holders[rank] = slot
            held = sorted(slot for slot in holders if slot is not None)
            place, before = holders[job.world.rank], self.size
            self.slot, self.size = None if place is None else held.index(place), len(held)
            self.prepared = bool(told[:, 1].all())
            if not self.prepared and not groups.is_initialized():
                init.begin(job, None, self.timeout_s, self._backend)
        return Change(tuple(free), before, self.size, holders.count(None))

    def take(self) -> None:
        """Make a default group of all ranks but the spares. All ranks call this, also the spares."""
        job = self.job
        if groups.is_initialized() and self.size == job.world.size:
            return
        job.liveness.heard.pop(Tag.RUN_OVER, None)
        if groups.is_initialized():
            groups.destroy(groups.doomed())
        with time_limit(self.timeout_s, "elastic.run"):
            color, key = (MPI.UNDEFINED, 0) if self.slot is None else (0, self.slot)
            comm = MPI.Intracomm(job.world.comm.Split(color, key))
            if comm != MPI.COMM_NULL:
                job.failures.register_comm(comm)
                init.begin(job, comm, self.timeout_s, self._backend)

    def wait(self) -> Any:
        """Sleep on a spare until the run is over, and return or raise its outcome.

        If a rank fails meanwhile, it raises `RankFailedError`.
        """
        job = self.job
        neighbour = Neighbour(job, self.timeout_s)
        while Tag.RUN_OVER not in job.liveness.heard:
            try:
                job.liveness.progress()
                if silence := neighbour.silence():
                    abort(f"a spare waits for the end of elastic.run, and {silence}", EXIT_TIMEOUT)
            except MPI.Exception as error:
                job.failures.translate(error)
                raise
            job.failures.raise_if_failed()
            time.sleep(_LOOK_S)
        outcome, raised = pickle.loads(job.liveness.heard[Tag.RUN_OVER])
        if raised is not None:
            raise raised
        return outcome

    def tell(self, outcome: tuple[Any, BaseException | None]) -> None:
        """Send the outcome from rank 0 of the run to the spares. On other ranks, and after a failure, do nothing."""
        job = self.job
        if self.slot != 0 or job.failures.happened() or not groups.is_initialized():
            return
        working = groups.default_group()._link.ranks
        for rank in job.world.ranks:
            if rank not in working:
                job.liveness.send(rank, Tag.RUN_OVER, _pickled(outcome))


def _pickled(outcome: tuple[Any, BaseException | None]) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:  # an exception may hold an object that cannot be pickled
        return pickle.dumps((None, DistError(f"rank 0 ended with {outcome[1]!r}")))
