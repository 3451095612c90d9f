"""``LocalSGD``: a run in which ranks average parameters every few steps, instead of gradients in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mpiddp.distributed as dist
from mpiddp.optim import Optimizer
from mpiddp.parallel import DiLoCo, DistributedDataParallel, GradBucket, allreduce_hook, noop_hook

from .trainer import Trainer


class LocalSGD:
    """A callback for the ends of steps that averages parameters, and this rank's state for checkpoints.

    Gradients are averaged in the averager's warm-up only; parameters are equal at the end of an epoch.
    """

    def __init__(self, averager: DiLoCo, model: DistributedDataParallel, optimizer: Optimizer) -> None:
        self.averager, self._optimizer = averager, optimizer
        self._parameters = list(model.module.parameters())
        model.register_comm_hook(None, self._average_gradients)

    def _average_gradients(self, _: None, bucket: GradBucket) -> dist.Future:
        warming_up = self.averager.step < self.averager.warmup_steps
        return (allreduce_hook if warming_up else noop_hook)(None, bucket)

    def __call__(self, trainer: Trainer) -> None:
        """Average the parameters that are due; after the last step of an epoch, all of them."""
        self.averager.average_parameters(self._parameters)
        at = trainer.train_loader.state_dict()
        # The number of steps does not tell, because a resumed run may have another batch size.
        if at["position"] == at["length"]:
            self.averager.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, optimizer state and position in the period; arrays are live."""
        return {
            "parameters": [p.data for p in self._parameters],
            "optimizer": self._optimizer.state_dict()["state"],
            "averager": self.averager.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the optimizers' present options; arrays are copied."""
        for parameter, saved in zip(self._parameters, state["parameters"], strict=True):
            parameter.data[...] = saved
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": self._options(self._optimizer)})
        outer = state["averager"]["outer_optimizer"] | {"param_groups": self._options(self.averager.outer_optimizer)}
        self.averager.load_state_dict(state["averager"] | {"outer_optimizer": outer})

    @staticmethod
    def _options(optimizer: Optimizer) -> Any:
        return optimizer.state_dict()["param_groups"]
