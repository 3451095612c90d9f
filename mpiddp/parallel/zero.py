"""ZeroRedundancyOptimizer: each rank updates its share of the parameters, and holds their optimizer state."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np

from mpiddp.distributed import ProcessGroup, gather_object
from mpiddp.distributed.groups import GroupLike, known
from mpiddp.nn import Parameter
from mpiddp.optim import Optimizer
from mpiddp.optim.flat import ContiguousRun

from .join import Join, Joinable, JoinHook
from .replicas import broadcast_arrays


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose state is sharded over the ranks, as in torch.

    Each parameter belongs to one rank. The largest parameters are assigned first, each to the rank that has the fewest
    elements so far. In a step each rank updates its parameters, and sends them to the others in one message. Gradients
    must be averaged before the step.

    Parameters
    ----------
    params : iterable of Parameter or of dict
    optimizer_class : type of Optimizer
        The optimizer whose ``_update`` updates the parameters of each shard. Its ``step`` is not called.
    process_group : ProcessGroup, optional
    parameters_as_bucket_view : bool
        Accepted for compatibility with torch, without effect.
    **defaults
        Options of ``optimizer_class``.

    References
    ----------
    S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020 (stage 1).

    Examples
    --------
    >>> optimizer = dist.ZeroRedundancyOptimizer(ddp.parameters(), optim.Adam, lr=1e-3)  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        process_group: GroupLike = None,
        parameters_as_bucket_view: bool = False,
        **defaults: Any,
    ) -> None:
        # Only the defaults and `_update` of this optimizer are used. Its `step` is never called, so it has no state.
        self.optim = optimizer_class(params, **defaults)
        self.process_group = known(process_group)
        self._loads = np.zeros(self.process_group.size(), np.int64)
        self._owners: dict[int, int] = {}
        self._consolidated: dict[int, Any] | None = None
        super().__init__(self.optim.param_groups, self.optim.defaults)

    def _owns(self, parameter: Parameter) -> bool:
        return self._owners[id(parameter)] == self.process_group.rank()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own. All ranks call this with the same parameters."""
        super().add_param_group(param_group)
        for parameter in sorted(self.param_groups[-1]["params"], key=lambda p: -p.data.size):
            owner = int(self._loads.argmin())
            self._owners[id(parameter)] = owner
            self._loads[owner] += parameter.data.size

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, and send each parameter from its owner to all ranks.

        If ``closure`` is given, it is called first, to compute the gradients, and its result is returned.
        """
        Join.notify_join_context(self)
        loss = None if closure is None else closure()
        for group, runs in zip(self.param_groups, self._runs, strict=True):
            for run in runs.of([p for p in group["params"] if self._owns(p)]):
                self._update(run, group)
        for owner in range(self.process_group.size()):
            arrays = [p.data for p in self._parameters() if self._owners[id(p)] == owner]
            broadcast_arrays(arrays, self.process_group, owner)
        self._consolidated = None
        return loss

    def _update(self, run: ContiguousRun, group: dict[str, Any]) -> None:
        self.optim._update(run, group)

    def owned(self) -> list[int]:
        """Return the numbers of the parameters that this rank updates. All parameters of the optimizer are counted."""
        return [number for number, parameter in enumerate(self._parameters()) if self._owns(parameter)]

    def shard(self) -> dict[int, Any]:
        """Return the state of this rank's parameters, by the numbers that `owned` returns.

        All ranks' shards together are the ``state`` of `state_dict`. `load_state_dict` needs only the state of the
        parameters that this rank owns, even if the state was saved with another number of ranks.
        """
        state: dict[int, Any] = super().state_dict()["state"]
        return state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on the global rank ``to``, which can then call `state_dict`.

        All ranks call this together.
        """
        shard = self.shard()
        receives = self.process_group._group_rank(to) == self.process_group.rank()
        shards: list[Any] | None = [None] * self.process_group.size() if receives else None
        gather_object(shard, shards, dst=to, group=self.process_group)
        self._consolidated = None if shards is None else {k: v for each in shards for k, v in each.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the form of an optimizer that is not sharded.

        RuntimeError if `consolidate_state_dict` has not collected it on this rank since the last step.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(to="
                f"{self.process_group.ranks[self.process_group.rank()]})` on all ranks beforehand if you meant to save"
                " the global state."
            )
        whole = super().state_dict()
        return {"state": dict(sorted(self._consolidated.items())), "param_groups": whole["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a whole state, which may come from an optimizer that is not sharded.

        Only the state of the parameters in `owned` is read.
        """
        owned, state = set(self.owned()), state_dict["state"]
        order = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = {saved for number, saved in enumerate(order) if number in owned}
        super().load_state_dict({**state_dict, "state": {number: state[number] for number in mine & state.keys()}})
        self._consolidated = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Steps(self)

    @property
    def join_process_group(self) -> ProcessGroup:
        return self.process_group


class _Steps(JoinHook):
    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.step()
