import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpiddp.optim import SGD, lr_scheduler

from .test_optimizer import Parameter

Make = Callable[[Any, Any], Any]
CASES: dict[str, Make] = {
    "steps": lambda module, opt: module.StepLR(opt, step_size=3, gamma=0.5),
    "milestones": lambda module, opt: module.MultiStepLR(opt, milestones=[7, 2, 2, 11], gamma=0.3),
    "function": lambda module, opt: module.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "linear": lambda module, opt: module.LinearLR(opt),
    "linear to zero": lambda module, opt: module.LinearLR(opt, start_factor=1.0, end_factor=0.0, total_iters=13),
    "cosine": lambda module, opt: module.CosineAnnealingLR(opt, T_max=7, eta_min=0.01),
    "half a cosine": lambda module, opt: module.CosineAnnealingLR(opt, T_max=40),
}


def optimizer() -> Any:
    return SGD([{"params": [Parameter(np.ones(2))]}, {"params": [Parameter(np.ones(2))], "lr": 0.3}], lr=0.1)


def rates(opt: Any) -> list[float]:
    return [group["lr"] for group in opt.param_groups]


def warm_up(module: Any, opt: Any) -> Any:
    schedules = [module.LinearLR(opt, total_iters=4), module.CosineAnnealingLR(opt, T_max=8, eta_min=0.001)]
    return module.SequentialLR(opt, schedules, milestones=[4])


def sequence(module: Any, opt: Any) -> Any:
    inner = [module.StepLR(opt, step_size=2, gamma=0.5), module.LambdaLR(opt, lambda step: 0.7**step)]
    schedules = [
        module.LinearLR(opt, start_factor=0.1, total_iters=4),
        module.CosineAnnealingLR(opt, T_max=8, eta_min=0.001),
        module.SequentialLR(opt, inner, milestones=[3]),
    ]
    return module.SequentialLR(opt, schedules, milestones=[4, 12])


@pytest.mark.parametrize("make", [*CASES.values(), warm_up], ids=[*CASES, "warm-up"])
def test_equals_torch(torch: Any, make: Make) -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    mine = optimizer()
    theirs = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], lr=0.1)
    schedules = [make(lr_scheduler, mine), make(torch.optim.lr_scheduler, theirs)]
    for _ in range(30):
        assert np.allclose(rates(mine), rates(theirs), rtol=1e-12, atol=1e-15)
        assert schedules[0].last_epoch == schedules[1].last_epoch and schedules[0].get_last_lr() == rates(mine)
        theirs.step()
        for schedule in schedules:
            schedule.step()


def test_nested_sequence_counts_from_where_each_begins() -> None:
    opt = optimizer()
    schedule = sequence(lr_scheduler, opt)
    factors = []
    for _ in range(20):
        factors.append(rates(opt)[0] / 0.1)
        schedule.step()
    assert np.allclose(factors[:5], [0.1, 0.325, 0.55, 0.775, 1.0])
    assert np.allclose(factors[12:20], [1, 1, 0.5, 1, 0.7, 0.49, 0.343, 0.2401])


@pytest.mark.parametrize("make", [*CASES.values(), sequence], ids=[*CASES, "sequence"])
@pytest.mark.parametrize("steps", [0, 1, 5, 13, 17])
def test_resumes(make: Make, steps: int) -> None:
    first, second = optimizer(), optimizer()
    schedule = make(lr_scheduler, first)
    for _ in range(steps):
        schedule.step()
    saved = json.loads(json.dumps([schedule.state_dict(), first.state_dict()["param_groups"]]))
    resumed = make(lr_scheduler, second)
    resumed.load_state_dict(saved[0])
    second.load_state_dict({"state": {}, "param_groups": saved[1]})
    assert rates(first) == rates(second)
    for _ in range(10):
        schedule.step()
        resumed.step()
        assert rates(first) == rates(second) and schedule.last_epoch == resumed.last_epoch


def test_rates_reach_the_step_as_plain_numbers() -> None:
    param = Parameter(np.ones(2, np.float32), np.ones(2, np.float32))
    opt = SGD([param], lr=np.float64(0.5))  # type: ignore[arg-type]
    opt.step()
    assert param.data.tolist() == [0.5, 0.5]


def test_misuse() -> None:
    opt, other = optimizer(), optimizer()
    with pytest.raises(ValueError, match="one more than"):
        lr_scheduler.SequentialLR(opt, [lr_scheduler.StepLR(opt, 1)], milestones=[3])
    late = lr_scheduler.StepLR(other, 1)
    other.add_param_group({"params": [Parameter(np.ones(2))]})
    with pytest.raises(ValueError, match="shorter"):
        late.step()
