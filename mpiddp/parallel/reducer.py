"""The reducer sends each bucket when the bucket's last gradient is ready, while backward computes other gradients.

Autograd writes a gradient into its bucket and calls the parameter's hook. The hook of the last gradient in a bucket
submits the bucket's all-reduce. Hooks also poll, so that submitted all-reduces make progress. At the end of backward
the reducer waits for all of them. All ranks submit their buckets in the same order.
"""

import functools
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from mpiddp.algorithms.plan import make
from mpiddp.distributed import Future, ProcessGroup, ReduceOp, Work, all_reduce
from mpiddp.distributed.dispatch import dispatch
from mpiddp.distributed.groups import member
from mpiddp.mpi import requests
from mpiddp.mpi.reduction import in_pairs
from mpiddp.typing import Array

from .buckets import Buckets, GradBucket, ParameterLike, caps_in_bytes
from .hooks import CommHook, averages, call, completed
from .timeline import Timeline
from .virtual_ranks import PartialSums

_UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that"
    " your module has parameters that were not used in producing loss. Pass find_unused_parameters=True to"
    " DistributedDataParallel, and make sure that all forward outputs take part in the loss; where parameters were"
    " frozen or replaced after wrapping, wrap the model again. Parameters that did not receive a gradient on rank"
    " {rank}: {names}"
)


class Options(NamedTuple):
    """The options of `DistributedDataParallel` that have to be equal on all ranks."""

    broadcast_buffers: bool | None
    bucket_cap_mb: float | None
    bucket_cap_mb_list: Sequence[float] | None
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool | None
    skip_all_reduce_unused_params: bool
    virtual_ranks: int | None


class Reducer:
    """The object that averages the gradients of a model over the ranks of a group.

    ``named_parameters`` are in the order of registration, which is the same on all ranks. ``queue_callback(f)`` makes
    autograd call ``f`` at the end of the running backward.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, ParameterLike]],
        group: ProcessGroup,
        options: Options,
        queue_callback: Callable[[Callable[[], object]], None],
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._group = group
        self._find_unused, self._static_graph = options.find_unused_parameters, options.static_graph
        self._skip_unused = options.skip_all_reduce_unused_params and self._find_unused
        self._queue_callback = queue_callback
        self._hook: CommHook | None = None
        self.comm_hook_state: Any = None
        self.weight: float | None = None
        """This rank's share of the samples in the running step; None stands for 1 / `divisor`."""
        self.divisor: int | None = None
        """The number of ranks with inputs, by which sums are divided; None stands for the number of all ranks."""
        self.timeline: Timeline | None = None
        self.exposed_ns = 0
        """Nanoseconds that this rank has waited for communication at the ends of backward passes."""
        self.backwards = 0
        """The number of backward passes that have reduced gradients."""
        self._running = False
        self._began_ns: int | None = None
        """The time at which the running backward began; None if none runs, as on a rank without inputs."""
        self._expected = False
        self._ready_order: list[int] = []
        self._next_bucket = 0
        self._pending: list[tuple[GradBucket, Work | Future]] = []
        self._used_somewhere: Array | None = None
        self._size = group.size()
        virtual_ranks = options.virtual_ranks
        self.partial = None if virtual_ranks is None else PartialSums(virtual_ranks, group, named_parameters)
        # The key of a cached plan contains this reduction. The reduction is made anew only when the weight changes, so
        # that later steps find their plans.
        self._average = self._averaging(1 / self._size)
        caps_bytes = caps_in_bytes(options.bucket_cap_mb, options.bucket_cap_mb_list)
        self.buckets = Buckets(self._parameters, group, caps_bytes)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._mark_ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def _averaging(self, weight: float) -> ReduceOp:
        return ReduceOp.PREMUL_SUM(weight) if self.partial is None else in_pairs(weight, self.partial.across)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Use a communication hook; RuntimeError if there is one already, or if a backward has reduced gradients."""
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self.backwards:
            raise RuntimeError("Communication hook has to be registered before the first backward.")
        self._hook, self.comm_hook_state = hook, state

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter.grad_slot = None

    def expect_backward(self, expected: bool = True) -> None:
        """Set whether the next gradient begins a backward, if the hook of an output has not called `begin` before."""
        self._expected = expected

    def begin(self) -> None:
        if not self._running:
            if self.partial is not None:
                self.partial.check_turn()
            self._reset()
            self._running = True
            self._expected = False
            self._began_ns = perf_counter_ns()
            self._queue_callback(self._finish_backward)

    def _reset(self) -> None:
        self._ready_order.clear()
        self._pending.clear()
        self._next_bucket = 0
        for bucket in self.buckets.in_order:
            bucket.pending = len(bucket._parameters)

    def abort_backward(self) -> None:
        """End a backward that an error has interrupted.

        The other ranks may still reduce the remaining buckets of this step. This rank sends these buckets as NaN, which
        shows that the sums are not valid. Without that, the other ranks would take its messages of the next step for
        those of this step.
        """
        if not self._running:
            return
        self._running = False
        for bucket in self.buckets.in_order[self._next_bucket :]:
            bucket.buffer()[...] = np.nan
            bucket.pending = 0
        self._send_complete()
        self._agree_on_use((), complete=False)
        self._wait()
        self._count_backward(self.buckets.order)

    def _mark_ready(self, index: int, parameter: ParameterLike) -> None:
        if not self._running:
            if not self._expected:
                return
            self.begin()
        self._ready_order.append(index)
        bucket, slot = self.buckets.slots[index]
        self._move_to_slot(index, parameter, slot)
        bucket.pending -= 1
        if bucket.pending == 0:
            self._send_complete()
        if requests.pending:
            requests.poll()

    def _move_to_slot(self, index: int, parameter: ParameterLike, slot: Array) -> None:
        if slot.dtype != parameter.data.dtype:
            raise RuntimeError(
                f"{self._names[index]} was {slot.dtype} when DistributedDataParallel wrapped the model and is"
                f" {parameter.dtype} now: convert a model first, then wrap it"
            )
        if parameter.grad is not slot and parameter.grad is not None:
            slot[...] = parameter.grad
            parameter.grad = slot

    def _send_complete(self, unused: Sequence[int] = ()) -> None:
        """Submit the complete buckets that are next in order, but skip those that hold only ``unused`` parameters."""
        needless = {id(self._parameters[index]) for index in unused}
        for bucket in self.buckets.in_order[self._next_bucket :]:
            if bucket.pending:
                break
            self._next_bucket += 1
            if needless and needless.issuperset(map(id, bucket.parameters())):
                continue
            timeline, began = self.timeline, perf_counter_ns()
            outcome = self._send(bucket)
            self._pending.append((bucket, outcome))
            if timeline is not None:
                _trace(timeline, bucket, began, outcome)

    def _send(self, bucket: GradBucket) -> Work | Future:
        buffer, size = bucket._buffer, self._size
        weight = 1 / (self.divisor or size) if self.weight is None else self.weight
        if weight == 0:
            buffer[...] = 0  # without samples the gradient is NaN, and so is NaN times 0
        if self._hook is not None:
            if weight != 1 / size:
                buffer *= buffer.dtype.type(weight * size)  # communication hooks divide by the number of ranks
            return call(self._hook, self.comm_hook_state, bucket)
        if self.partial is not None:
            weight = self.partial.add_to(bucket, weight)
            if size == 1:
                return completed(buffer)
        if self._average.factor != weight:
            self._average = self._averaging(weight)
        group, op = self._group, self._average
        key = ("bucket", bucket._index, op, buffer.dtype, buffer.size, type(buffer))
        plan = group._plans.get(key)
        if plan is None:  # the first time, or because the group has ended and has no plans
            member(group, "all_reduce")
            plan = make(group._link, "all_reduce", None, buffer, buffer, op, bucket=bucket._index)
            group._plans.remember(key, plan)
        return dispatch(group, plan, (buffer, op), (buffer,), async_op=True)  # type: ignore[return-value]

    def keep(self, weight: float) -> None:
        """Add a micro-batch's gradients, times ``weight``, to the sums that the step's last micro-batch sends."""
        assert self.partial is not None, "there are virtual ranks"
        for index, parameter in enumerate(self._parameters):
            slot = self.buckets.slots[index].gradient
            if parameter.grad is None or weight == 0:
                slot[...] = 0
            else:
                self._move_to_slot(index, parameter, slot)
            if parameter.grad is not None:
                self.partial.used.add(index)
            parameter.grad = None
        self.partial.keep(self.buckets.in_order, weight)

    def shadow_backward(self) -> None:
        """Take part in the other ranks' reduction without a backward on this rank.

        This rank contributes the gradients that it has accumulated under `no_sync`, or zeros if there are none or if
        its weight is 0. RuntimeError with ``skip_all_reduce_unused_params``.
        """
        if self._skip_unused:
            raise RuntimeError(
                "skip_all_reduce_unused_params: a rank without samples does not know which buckets the others send."
                " Run forward and backward on an empty batch there, choose a batch size that gives every rank a sample,"
                " or leave the option out"
            )
        self.abort_backward()
        self._reset()
        self._finish_backward()

    def _finish_backward(self) -> None:
        """Send the remaining buckets, wait for all buckets, and set the gradients of unused parameters.

        Autograd calls this at the end of backward.
        """
        self._running = False
        ready = set(self._ready_order)
        not_ready = [index for index in self.buckets.order if index not in ready]
        for index in not_ready:
            parameter = self._parameters[index]
            bucket, slot = self.buckets.slots[index]
            if parameter.grad is None:
                slot[...] = 0
            else:
                self._move_to_slot(index, parameter, slot)  # a gradient of an earlier backward, under no_sync
            bucket.pending -= 1
        unused = [index for index in not_ready if self._parameters[index].grad is None]
        if self.partial is not None:  # an earlier micro-batch of the step may have used them
            for index in self.partial.used.intersection(unused):
                unused.remove(index)
                self._parameters[index].grad = self.buckets.slots[index].gradient
        self._send_complete(unused if self._skip_unused else ())
        used_somewhere = self._agree_on_use(unused)
        self._wait()
        for index in unused:
            if used_somewhere is None or used_somewhere[index]:
                self._parameters[index].grad = self.buckets.slots[index].gradient
        self._count_backward(self._ready_order + not_ready)
        if unused and used_somewhere is None and self.weight != 0:
            names = ", ".join(self._names[index] for index in sorted(unused))
            raise RuntimeError(_UNUSED.format(rank=self._group.rank(), names=names))

    def _count_backward(self, order: list[int]) -> None:
        self.backwards += 1
        if self.partial is not None:
            self.partial.reset()
        if not self.buckets.settled:
            self.buckets.settle(None if self._find_unused else order)

    def _agree_on_use(self, unused: Sequence[int], *, complete: bool = True) -> Array | None:
        """Return, for each parameter, whether any rank has a gradient of it; None if unused parameters are an error.

        With a static graph, the result of the first backward that is complete on all ranks is used in all later ones.
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
        computed_ns = perf_counter_ns()
        for bucket, outcome in self._pending:
            value = outcome.wait()
            if isinstance(outcome, Future):
                bucket.set_buffer(averages(value, bucket))
        now_ns = perf_counter_ns()
        self.exposed_ns += now_ns - computed_ns
        if self.timeline is not None:
            if self._began_ns is not None:
                self.timeline.add("backward", "backward", self._began_ns, computed_ns)
            self.timeline.add("wait", "wait", computed_ns, now_ns)
        self._began_ns = None
        self._pending.clear()


def _trace(timeline: Timeline, bucket: GradBucket, began_ns: int, outcome: Work | Future) -> None:
    future = outcome.get_future() if isinstance(outcome, Work) else outcome
    lane, size = f"bucket {bucket.index()}", f"{bucket.buffer().nbytes} bytes"
    future.then(lambda _: timeline.add(lane, size, began_ns, perf_counter_ns()))
