"""Parameters whose gradients wait for that of another one, and are then averaged together."""

from __future__ import annotations

from collections.abc import Sequence

from mpiddp.autograd import RemovableHandle, queue_callback
from mpiddp.distributed import ProcessGroup, ReduceOp, Work, all_reduce
from mpiddp.nn import Parameter

from .bucket import GradBucket, lay_out
from .replicas import broadcast_arrays


class DelayedAverage:
    """Averages the gradients of some parameters when the gradient of another one is final.

    For parameters that several parts of a model use, at moments that the reducer cannot foresee. They know nothing of
    ``no_sync``, weights and communication hooks: each backward that reaches the other parameter averages them.

    Parameters
    ----------
    parameters : sequence of Parameter
        Whose gradients; nobody else averages them. Those without one count as zeros.
    trigger : Parameter
        Whose gradient starts it.
    group : ProcessGroup
        The ranks. Making it is collective over them, and makes all values those of the first rank.

    References
    ----------
    torch's ``DistributedDataParallel(delay_all_reduce_named_params=..., param_to_hook_all_reduce=...)``.
    """

    def __init__(self, parameters: Sequence[Parameter], trigger: Parameter, group: ProcessGroup) -> None:
        self._group = group
        broadcast_arrays([parameter.data for parameter in parameters], group)
        kinds = dict.fromkeys(parameter.dtype for parameter in parameters)
        self._buckets = lay_out([[p for p in parameters if p.dtype == kind] for kind in kinds], group)
        self._mean = ReduceOp.PREMUL_SUM(1 / group.size())
        self._on_their_way: list[Work] = []
        self._handle: RemovableHandle = trigger.register_post_accumulate_grad_hook(self._begin)

    def _begin(self, _: object) -> None:
        for bucket in self._buckets:
            _gather(bucket)
            work = all_reduce(bucket.buffer(), self._mean, self._group, async_op=True)
            assert work is not None
            self._on_their_way.append(work)
        queue_callback(self._finish)

    def _finish(self) -> None:
        for work in self._on_their_way:
            work.wait()
        self._on_their_way.clear()

    def detach(self) -> None:
        """Leave the parameters alone from now on."""
        self._handle.remove()
        for bucket in self._buckets:
            for parameter in bucket.parameters():
                parameter.grad_slot = None


def _gather(bucket: GradBucket) -> None:
    """Make the bucket hold its parameters' gradients, zeros for those that have none, and them be views of it."""
    for parameter, slot in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter.grad is None:
            slot[...] = 0
        elif parameter.grad is not slot:
            slot[...] = parameter.grad
        parameter.grad = slot
