"""``DataLoader``: batches of a data set in a sampler's order, fetched ahead by threads, copied to the GPU ahead.

The workers are threads: NumPy and file reads release the GIL, and a process that is forked after ``MPI_Init`` is not
safe. With ``device="cuda"`` the workers only write to pinned memory. All copies to the GPU are queued by the thread
that iterates over the loader, because the current device and stream are those of that thread.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np

from mpiddp.device import empty, pinned, stream
from mpiddp.device.transfer import up
from mpiddp.nested import map_nested
from mpiddp.typing import Array

from .dataset import Dataset, fetch
from .samplers import BatchSampler, BatchShare, RandomSampler

T = TypeVar("T")
Indices = Sequence[int] | Array


_Ticket = tuple[BatchShare | None, dict[str, Any]]
"""The sizes of a batch, and the sampler's state after that batch."""
_Batches = Generator[tuple[_Ticket, Any], None, None]


class DataLoader:
    """Iterate over a data set in batches (``torch.utils.data.DataLoader``).

    Batches come in the sampler's order with any number of workers. A worker's exception is raised in the place of its
    batch; an abandoned iterator ends its threads. ``batch_size`` is the number of samples on this rank. ``pin_memory``
    is ignored, because ``device="cuda"`` always uses pinned memory and ``device="cpu"`` never does.

    Parameters
    ----------
    shuffle : bool
        Use a :class:`~mpiddp.data.RandomSampler` with ``generator``, random numbers or their seed.
    sampler : iterable of int, optional
        The order of the samples, such as a :class:`~mpiddp.data.DistributedSampler`, instead of ``shuffle``.
    batch_sampler : iterable of sequences of int, optional
        Indices of each batch, such as a :class:`~mpiddp.data.GlobalBatchSampler`, instead of ``batch_size``,
        ``shuffle``, ``sampler`` and ``drop_last``.
    num_workers : int
        Threads that fetch batches ahead, ``prefetch_factor`` each. With 0 the thread that iterates fetches them.
    collate_fn : callable, optional
        A function that makes a batch of a list of samples. Default: the data set's ``batch``, which needs no loop over
        samples, or :func:`~mpiddp.data.default_collate`.
    device : {"cpu", "cuda"}
        The device of the batches; "cuda" is the current GPU. Each batch is copied to the GPU while it computes on the
        batch before. The current stream waits for the copy; the thread that iterates does not.

    Attributes
    ----------
    current : BatchShare or None
        Sizes of the batch handed over last, if the batch sampler knows them.

    Examples
    --------
    >>> from mpiddp.data import ArrayDataset
    >>> [x.tolist() for (x,) in DataLoader(ArrayDataset(np.arange(5)), batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Indices] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        *,
        generator: np.random.Generator | int | None = None,
        prefetch_factor: int = 2,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:

        if device not in ("cpu", "cuda"):
            raise ValueError(f"device should be 'cpu' or 'cuda', got {device!r}; set_device chooses among GPUs")
        if sampler is not None and shuffle:
            raise ValueError("sampler option is mutually exclusive with shuffle")
        if batch_sampler is not None:
            if batch_size != 1 or shuffle or sampler is not None or drop_last:
                raise ValueError(
                    "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"
                )
        else:
            if sampler is None:
                sampler = RandomSampler(dataset, generator=generator) if shuffle else range(len(dataset))
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self.dataset = dataset
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.device = device
        self.current: BatchShare | None = None
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        fetched = ((ticket, self._fetch(indices)) for ticket, indices in self._tickets())
        batches = self._fetched_ahead() if self.num_workers else fetched
        with contextlib.closing(_uploaded(batches) if self.device == "cuda" else batches) as ready:
            for ticket, batch in ready:
                self.current, self._state = ticket
                yield batch
        self._state = None

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler, if it takes one."""
        self._state = None
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state after the batch that was handed over last.

        Batches that are only fetched ahead do not count. The state is empty if the sampler has none.
        """
        return self._sampler_state() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which ``state`` was taken."""
        self._state = None
        if hasattr(self.batch_sampler, "load_state_dict"):
            self.batch_sampler.load_state_dict(state)

    def _sampler_state(self) -> dict[str, Any]:
        return self.batch_sampler.state_dict() if hasattr(self.batch_sampler, "state_dict") else {}

    def _tickets(self) -> Iterator[tuple[_Ticket, Indices]]:
        for indices in self.batch_sampler:
            yield (getattr(self.batch_sampler, "current", None), self._sampler_state()), indices

    def _fetch(self, indices: Indices) -> Any:
        batch = fetch(self.dataset, indices, self.collate_fn)
        return pin(batch) if self.device == "cuda" else batch

    def _fetched_ahead(self) -> _Batches:
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="mpiddp-loader")
        begun = ((ticket, pool.submit(self._fetch, indices)) for ticket, indices in self._tickets())
        try:
            for ticket, batch in _ahead(begun, self.num_workers * self.prefetch_factor, deque()):
                yield ticket, batch.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _ahead(begun: Iterator[T], count: int, waiting: deque[T]) -> Iterator[T]:
    """Yield each item of ``begun`` once the next ``count`` items have begun; these are kept in ``waiting``.

    An exception that ``begun`` raises is raised after all items before it.
    """
    fault: Exception | None = None
    try:
        for each in begun:
            waiting.append(each)
            if len(waiting) > count:
                yield waiting.popleft()
    except Exception as error:
        fault = error
    while waiting:
        yield waiting.popleft()
    if fault is not None:
        raise fault


def _uploaded(batches: _Batches) -> _Batches:
    """Copy each batch to the device while the program uses the batch before."""
    waiting: deque[tuple[_Ticket, Any, Callable[[], None]]] = deque()
    try:
        for ticket, batch, hold in _ahead(((ticket, *send(batch)) for ticket, batch in batches), 1, waiting):
            hold()
            yield ticket, batch
    finally:
        batches.close()
        for *_, hold in waiting:
            hold()  # the copy must end before the batch's memory is used again


class Pinned:
    """A copy of a host array in pinned memory: ``host`` is the array, ``memory`` its bytes from `pinned.take`."""

    def __init__(self, x: Array, memory: Array) -> None:
        self.memory = memory
        self.host: Array = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
        self.host[...] = x


def pin(batch: Any) -> Any:
    """Return a batch with its arrays of numbers copied to `Pinned`; any thread may call this."""
    return map_nested(_pinned, batch, np.ndarray)


def _pinned(x: Array) -> Any:
    return Pinned(x, pinned.take(x.nbytes)) if x.dtype.kind in "biufc" or x.dtype.name == "bfloat16" else x


def send(batch: Any) -> tuple[Any, Callable[[], None]]:
    """Begin to copy a batch of `pin` to the device.

    Return the batch on the device, and a function that makes the current stream wait for the copy.
    """
    sources: list[Pinned] = []
    target: Array | None = None

    def begin(x: Pinned) -> Array:
        nonlocal target
        target = empty(x.host.shape, x.host.dtype)
        # The memory of `target` may have held a batch on which the current stream still works, so the copy waits.
        up(target, x.host, stream.after("upload", target))
        sources.append(x)
        return target

    sending = map_nested(begin, batch, Pinned)
    if target is None:
        return sending, lambda: None
    there = stream.mark(stream.side("upload", target))
    for x in sources:
        pinned.give_when(there, x.memory)
    return sending, functools.partial(stream.hold, target, there)
