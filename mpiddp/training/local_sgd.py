"""``LocalSGD``: ranks average parameters every few steps instead of gradients in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpiddp.distributed.groups import default_group
from mpiddp.optim import Optimizer
from mpiddp.parallel import DiLoCo, DistributedDataParallel, PostLocalSGDState, post_localSGD_hook

from .config import Config
from .trainer import Trainer


class LocalSGD:
    """Callback for the ends of steps, and this rank's state for checkpoints.

    Gradients are averaged in the first ``local_start`` steps only; parameters are equal at the end of an epoch.
    """

    def __init__(
        self, config: Config, model: DistributedDataParallel, optimizer: Optimizer, steps_an_epoch: int
    ) -> None:
        self._optimizer, self._steps_an_epoch = optimizer, steps_an_epoch
        self._hook_state = PostLocalSGDState(None, default_group(), config.local_start, False)
        model.register_comm_hook(self._hook_state, post_localSGD_hook)
        self._averager = DiLoCo(
            optimizer.param_groups,
            config.period,
            config.fragments,
            lr=config.outer_lr,
            momentum=config.outer_momentum,
            warmup_steps=config.local_start,
        )

    def __call__(self, trainer: Trainer) -> None:
        """Average what is due; all after an epoch's last step."""
        self._averager.average_parameters(self._optimizer.param_groups)
        if trainer.step % self._steps_an_epoch == 0:
            self._averager.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, optimizer state and position in the period; arrays are live."""
        return {
            "iter": self._hook_state.iter,
            "parameters": [p.data for group in self._optimizer.param_groups for p in group["params"]],
            "optimizer": self._optimizer.state_dict()["state"],
            "averager": self._averager.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the optimizer's present options; arrays are copied."""
        self._hook_state.iter = state["iter"]
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter, saved in zip(parameters, state["parameters"], strict=True):
            parameter.data[...] = saved
        options = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": options})
        self._averager.load_state_dict(state["averager"])
