"""Post-local SGD: after some steps gradients are averaged in small groups only, and models now and then."""

from __future__ import annotations

from mpiddp.distributed import Future, ProcessGroup, new_subgroups
from mpiddp.distributed.groups import GroupLike
from mpiddp.parallel.bucket import GradBucket

from .default import allreduce_hook, completed, group_of


class PostLocalSGDState:
    """The state of `post_localSGD_hook`.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        Who averages gradients at first; all ranks by default.
    subgroup : ProcessGroup, optional
        Who averages them later; by default the ranks of this node, and making that group is collective over all ranks.
    start_localSGD_iter : int
        The first iteration that averages in the subgroup.
    post_local_gradient_allreduce : bool, default True
        False: gradients are not averaged at all from then on.

    References
    ----------
    T. Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020.
    ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.PostLocalSGDState``.
    """

    def __init__(
        self,
        process_group: GroupLike,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = group_of(process_group)
        self.subgroup = new_subgroups()[0] if subgroup is None else subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        """Iterations so far."""


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future:  # noqa: N802 - torch's name
    """Average a bucket over all ranks, and from iteration ``start_localSGD_iter`` on over those of the subgroup.

    Goes with `PostLocalSGDOptimizer`, which averages the models of all ranks now and then.

    References
    ----------
    ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.post_localSGD_hook``.
    """
    local = state.iter >= state.start_localSGD_iter
    if bucket.is_last():
        state.iter += 1
    if not local:
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return allreduce_hook(state.subgroup, bucket)
