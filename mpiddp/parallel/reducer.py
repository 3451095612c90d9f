"""The reducer: sends each bucket when its last gradient is there, while backward makes the others.

One gradient's way: autograd writes it into its bucket and calls the parameter's hook; the bucket's last hook submits an
all-reduce of the bucket; later hooks poll, which is what moves it; the end of backward waits. Buckets are submitted in
one order on all ranks, whatever the order in which their gradients were made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from mpiddp.autograd import queue_callback
from mpiddp.distributed import Future, ProcessGroup, ReduceOp, Work, all_reduce
from mpiddp.distributed.collectives import all_reduce_bucket
from mpiddp.mpi.requests import poll
from mpiddp.typing import Array

from .buckets import GradBucket, Handle, Layout, ParameterLike
from .hooks import CommHook, averages, call
from .timeline import StepTimes, Timeline

_UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that"
    " your module has parameters that were not used in producing loss. Pass find_unused_parameters=True to"
    " DistributedDataParallel, and make sure that all forward outputs take part in the loss; where parameters were"
    " frozen or replaced after wrapping, wrap the model again. Parameters that did not receive a gradient on rank"
    " {rank}: {names}"
)


class Reducer:
    """Averages the gradients of some parameters over a group, bucket by bucket.

    Parameters
    ----------
    named_parameters : sequence of (str, Parameter)
        In the order of registration; the same on all ranks.
    group : ProcessGroup
        The ranks.
    caps_bytes : sequence of int, optional
        See `mpiddp.parallel.buckets.plan`.
    find_unused : bool
        Some parameters may get no gradient in a backward, different ones on different ranks.
    static_graph : bool
        The ones that get none are the same in every backward: learned in the first.
    skip_unused : bool
        With ``find_unused``: those that get none are the same on all ranks, and buckets of nothing else stay here.
    queue_callback : callable
        Of the autograd that makes the gradients: calls what it is given when the backward that runs now has ended.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, ParameterLike]],
        group: ProcessGroup,
        caps_bytes: Sequence[int] | None,
        find_unused: bool,
        static_graph: bool,
        skip_unused: bool = False,
        queue_callback: Callable[[Callable[[], object]], None] = queue_callback,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._group = group
        self._find_unused = find_unused
        self._static_graph = static_graph
        self._skip_unused = skip_unused and find_unused
        self._queue_callback = queue_callback
        self._hook: CommHook | None = None
        self._hook_state: Any = None
        self.share: float | None = None
        """This rank's share of the samples, or None where all ranks count alike."""
        self.divisor: int | None = None
        """The number of ranks that have inputs, where it is to divide; None: all."""
        self.times = StepTimes()
        """Where the time of the iterations went."""
        self.backwards = 0
        """Backward passes that were reduced."""
        self._running = False
        self._armed = False
        self._unused_bytes = 0
        self._ready_order: list[int] = []
        self._next_bucket = 0
        self._on_their_way: list[tuple[GradBucket, Work | Future]] = []
        self._used_somewhere: Array | None = None
        # Kept, because what to do for an operation is remembered by its object.
        self._average = ReduceOp.PREMUL_SUM(1 / group.size())
        self.layout = Layout(self._parameters, group, caps_bytes)
        """Which bucket holds whose gradient."""
        self._handles: list[Handle] = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    @property
    def buckets(self) -> list[GradBucket]:
        """The buckets, in the order in which they are sent."""
        return self.layout.buckets

    def logging_data(self) -> dict[str, Any]:
        """Return layout, options and times under torch's names."""
        data = self.layout.logging_data() | {
            "iteration": self.backwards,
            "num_buckets_reduced": self._next_bucket,
            "find_unused_parameters": self._find_unused,
            "static_graph": self._static_graph,
            "unused_parameter_size": self._unused_bytes,
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, self._ready_order)),
        }
        if self._hook is not None:
            data["comm_hook"] = getattr(self._hook, "__name__", type(self._hook).__name__)
        return data | self.times.summary_ns()

    # -- hooks -----------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce the buckets instead of an all-reduce.

        Raises
        ------
        RuntimeError
            If one is registered already, or a backward has been reduced.
        TypeError
            If it cannot be called.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self.backwards:
            raise RuntimeError("Communication hook has to be registered before the first backward.")
        self._hook, self._hook_state = hook, state

    def detach(self) -> None:
        """Take the hooks off the parameters: their backward is a local matter again."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter.grad_slot = None

    # -- one backward ----------------------------------------------------------------------------------------------

    def arm(self, armed: bool = True) -> None:
        """Let the next gradient begin the reduction, where the output of forward hides its tensors."""
        self._armed = armed

    def begin(self) -> None:
        """Reduce what the backward that runs now makes, and finish at its end."""
        if not self._running:
            self._reset()
            self._running = True
            self._armed = False
            self.times.begin_backward()
            self._queue_callback(self._finish_backward)

    def _reset(self) -> None:
        self._ready_order.clear()
        self._on_their_way.clear()
        self._next_bucket = 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters())

    def abandon(self) -> None:
        """End a backward that an error has cut short.

        The other ranks may be in the same step without an error. What they wait for is sent as NaN: a sum that lacks
        this rank must not look like one, and the next step must not meet this one's messages.
        """
        if not self._running:
            return
        self._running = False
        for bucket in self.buckets[self._next_bucket :]:
            bucket.buffer()[...] = np.nan
            bucket.pending = 0
        self._send_complete()
        self._agree_on_use((), complete=False)
        self._wait()
        self._count_backward(self.layout.order)

    def _ready(self, index: int, parameter: ParameterLike) -> None:
        """Take note of a final gradient, and send what is complete."""
        if not self._running:
            if not self._armed:
                return
            self.begin()
        self._ready_order.append(index)
        bucket, slot = self.layout.places[index]
        self._keep(index, parameter, slot)
        bucket.pending -= 1
        if bucket.pending == 0:
            self._send_complete()
        poll()

    def _keep(self, index: int, parameter: ParameterLike, slot: Array) -> None:
        """Move a gradient that the program put elsewhere into its slot."""
        if slot.dtype != parameter.data.dtype:
            raise RuntimeError(
                f"{self._names[index]} was {slot.dtype} when DistributedDataParallel wrapped the model and is"
                f" {parameter.dtype} now: convert a model first, then wrap it"
            )
        if parameter.grad is not slot and parameter.grad is not None:
            slot[...] = parameter.grad
            parameter.grad = slot

    def _send_complete(self, unused: Sequence[int] = ()) -> None:
        """Submit the complete buckets that are next in order, but those that hold ``unused`` parameters only."""
        needless = {id(self._parameters[index]) for index in unused}
        while self._next_bucket < len(self.buckets) and self.buckets[self._next_bucket].pending == 0:
            bucket = self.buckets[self._next_bucket]
            if self._next_bucket == 0:
                self.times.begin_communication()
            self._next_bucket += 1
            if needless and needless.issuperset(map(id, bucket.parameters())):
                continue
            timeline, began = self.times.timeline, perf_counter_ns()
            outcome = self._send(bucket)
            self._on_their_way.append((bucket, outcome))
            if timeline is not None:
                _note(timeline, bucket, began, outcome)

    def _send(self, bucket: GradBucket) -> Work | Future:
        buffer, size = bucket.buffer(), self._group.size()
        share = 1 / (self.divisor or size) if self.share is None else self.share
        if share == 0:
            buffer[...] = 0  # the mean over no samples is no number, and zero times it is none either
        if self._hook is None:
            if self._average.factor != share:
                self._average = ReduceOp.PREMUL_SUM(share)
            return all_reduce_bucket(buffer, self._average, self._group, bucket.index())
        if share != 1 / size:
            buffer *= buffer.dtype.type(share * size)  # a hook divides by the number of ranks itself
        return call(self._hook, self._hook_state, bucket)

    def contribute_nothing(self) -> None:
        """Take part in a backward of the other ranks with gradients of zero, and receive its result.

        Raises
        ------
        RuntimeError
            With ``skip_unused``: which buckets the other ranks send is not known without a backward.
        """
        if self._skip_unused:
            raise RuntimeError(
                "skip_all_reduce_unused_params: a rank without samples does not know which buckets the others send."
                " Run forward and backward on an empty batch there, choose a batch size that gives every rank a sample,"
                " or leave the option out"
            )
        self.abandon()
        self._reset()
        self._finish_backward()

    def _finish_backward(self) -> None:
        """Send the rest, wait for everything, and settle what becomes of parameters without a gradient."""
        self._running = False
        came = set(self._ready_order)
        silent = [index for index in self.layout.order if index not in came]
        for index in silent:
            parameter = self._parameters[index]
            bucket, slot = self.layout.places[index]
            if parameter.grad is None:
                slot[...] = 0
            else:
                self._keep(index, parameter, slot)  # of an earlier backward that was not reduced
            bucket.pending -= 1
        unused = [index for index in silent if self._parameters[index].grad is None]
        self._send_complete(unused if self._skip_unused else ())
        self._unused_bytes = sum(self._parameters[index].data.nbytes for index in unused)
        used_somewhere = self._agree_on_use(unused)
        self._wait()
        for index in unused:
            if used_somewhere is None or used_somewhere[index]:
                self._parameters[index].grad = self.layout.places[index].slot
        self._count_backward(self._ready_order + silent)
        if unused and used_somewhere is None and self.share != 0:
            names = ", ".join(self._names[index] for index in sorted(unused))
            raise RuntimeError(_UNUSED.format(rank=self._group.rank(), names=names))

    def _count_backward(self, order: list[int]) -> None:
        """Count a reduced backward; after the first, follow the order in which gradients came, unless it is known."""
        self.backwards += 1
        if not self.layout.settled:
            self.layout.settle(None if self._find_unused else order)

    def _agree_on_use(self, unused: Sequence[int], *, complete: bool = True) -> Array | None:
        """Return, for each parameter, whether any rank has a gradient for it; None where all ranks must.

        A static graph is learned from a backward that is complete on all ranks.
        """
        if not (self._find_unused or self._static_graph):
            return None
        if self._used_somewhere is None or not self._static_graph:
            used = np.ones(len(self._parameters) + 1, dtype=bool)
            used[list(unused)] = False
            used[-1] = not complete
            if not self._skip_unused:
                all_reduce(used, ReduceOp.MAX, self._group)
            if used[-1]:
                return used[:-1]
            self._used_somewhere = used[:-1]
        return self._used_somewhere

    def _wait(self) -> None:
        """Wait until all buckets hold their averages."""
        self.times.begin_wait()
        for bucket, outcome in self._on_their_way:
            value = outcome.wait()
            if isinstance(outcome, Future):
                bucket.set_buffer(averages(value, bucket))
        self.times.end_wait()
        self._on_their_way.clear()


def _note(timeline: Timeline, bucket: GradBucket, began_ns: int, outcome: Work | Future) -> None:
    """Note a bucket's span when its communication ends."""
    future = outcome.get_future() if isinstance(outcome, Work) else outcome
    lane, size = f"bucket {bucket.index()}", f"{bucket.buffer().nbytes} bytes"
    future.then(lambda _: timeline.add(lane, size, began_ns, perf_counter_ns()))
