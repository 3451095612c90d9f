from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mpiddp.optim import SGD, Adam, lr_scheduler

CASES: list[tuple[str, dict[str, Any]]] = [
    ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ("MultiStepLR", {"milestones": [7, 2, 2, 11], "gamma": 0.3}),
    ("LambdaLR", {"lr_lambda": lambda step: 1 / (1 + step)}),
    ("LambdaLR", {"lr_lambda": [lambda step: 1 / (1 + step), lambda step: 0.5**step]}),
    ("LinearLR", {}),
    ("LinearLR", {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 13}),
    ("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.01}),
    ("CosineAnnealingLR", {"T_max": 40}),
]


class Parameter:
    def __init__(self) -> None:
        self.data, self.grad = np.ones(2), None


def optimizer(cls: Any = SGD, **options: Any) -> Any:
    options = {"momentum": 0.9} if cls is SGD else {}
    return cls([{"params": [Parameter()]}, {"params": [Parameter()], "lr": 0.3}], lr=0.1, **options)


def seen(opt: Any) -> list[Any]:
    return [group[key] for group in opt.param_groups for key in ("lr", "momentum", "betas") if key in group]


def same(mine: list[Any], theirs: list[Any]) -> None:
    assert np.allclose(np.hstack(mine), np.hstack(theirs), rtol=1e-12, atol=1e-15)


def torch_twin(torch: Any, cls: Any = SGD) -> Any:
    options = {"momentum": 0.9} if cls is SGD else {}
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    twin = getattr(torch.optim, cls.__name__)
    return twin([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], lr=0.1, **options)


@pytest.mark.parametrize("cls", [SGD, Adam])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_torch(name: str, options: dict[str, Any], cls: Any) -> None:
    torch = pytest.importorskip("torch")
    mine, theirs = optimizer(cls), torch_twin(torch, cls)
    my_schedule = getattr(lr_scheduler, name)(mine, **options)
    their_schedule = getattr(torch.optim.lr_scheduler, name)(theirs, **options)
    for _ in range(30):
        same(seen(mine), seen(theirs))
        assert my_schedule.last_epoch == their_schedule.last_epoch
        assert my_schedule.get_last_lr() == [group["lr"] for group in mine.param_groups]
        theirs.step()
        my_schedule.step()
        their_schedule.step()


def sequence(module: Any, opt: Any) -> Any:
    schedules = [
        module.LinearLR(opt, start_factor=0.1, total_iters=4),
        module.CosineAnnealingLR(opt, T_max=8, eta_min=0.001),
        module.SequentialLR(
            opt,
            [module.StepLR(opt, step_size=2, gamma=0.5), module.LambdaLR(opt, lambda step: 0.7**step)],
            milestones=[3],
        ),
    ]
    return module.SequentialLR(opt, schedules, milestones=[4, 12])


def test_sequence_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    mine, theirs = optimizer(), torch_twin(torch)
    flat_mine = lr_scheduler.SequentialLR(
        mine,
        [lr_scheduler.LinearLR(mine, total_iters=4), lr_scheduler.CosineAnnealingLR(mine, T_max=8, eta_min=0.001)],
        milestones=[4],
    )
    flat_theirs = torch.optim.lr_scheduler.SequentialLR(
        theirs,
        [
            torch.optim.lr_scheduler.LinearLR(theirs, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=8, eta_min=0.001),
        ],
        milestones=[4],
    )
    for _ in range(14):
        same(seen(mine), seen(theirs))
        assert np.allclose(flat_mine.get_last_lr(), flat_theirs.get_last_lr())
        theirs.step()
        flat_mine.step()
        flat_theirs.step()


def test_nested_sequence_counts_from_where_each_begins() -> None:
    opt = optimizer()
    schedule = sequence(lr_scheduler, opt)
    rates = []
    for _ in range(20):
        rates.append(opt.param_groups[0]["lr"] / 0.1)
        schedule.step()
    assert np.allclose(rates[:5], [0.1, 0.325, 0.55, 0.775, 1.0])
    assert np.allclose(rates[12:20], [1, 1, 0.5, 1, 0.7, 0.49, 0.343, 0.2401])


@pytest.mark.parametrize(("name", "options"), [*CASES, ("sequence", {})])
@pytest.mark.parametrize("steps", [0, 1, 5, 13, 17])
def test_resumes(name: str, options: dict[str, Any], steps: int) -> None:
    def make(opt: Any) -> Any:
        return sequence(lr_scheduler, opt) if name == "sequence" else getattr(lr_scheduler, name)(opt, **options)

    first = optimizer()
    schedule = make(first)
    for _ in range(steps):
        schedule.step()
    saved = json.loads(json.dumps([schedule.state_dict(), first.state_dict()["param_groups"]]))
    second = optimizer()
    resumed = make(second)
    resumed.load_state_dict(saved[0])
    second.load_state_dict({"state": {}, "param_groups": saved[1]})
    assert seen(first) == seen(second)
    for _ in range(10):
        schedule.step()
        resumed.step()
        assert seen(first) == seen(second) and schedule.last_epoch == resumed.last_epoch


def test_resumes_by_last_epoch() -> None:
    opt = optimizer()
    with pytest.raises(KeyError, match="initial_lr"):
        lr_scheduler.StepLR(opt, 2, last_epoch=3)
    schedule = lr_scheduler.StepLR(opt, 2)
    for _ in range(4):
        schedule.step()
    again = lr_scheduler.StepLR(opt, 2, last_epoch=3)
    assert again.get_last_lr() == schedule.get_last_lr()


def test_rates_reach_the_step_as_plain_numbers() -> None:
    param = Parameter()
    param.data = np.ones(2, np.float32)
    param.grad = np.ones(2, np.float32)
    opt = SGD([param], lr=np.float64(0.5))  # type: ignore[arg-type]
    opt.step()
    assert param.data.tolist() == [0.5, 0.5]


def test_misuse() -> None:
    opt, other = optimizer(), optimizer()
    with pytest.raises(TypeError, match="int is not an Optimizer"):
        lr_scheduler.StepLR(3, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected 2 lr_lambdas, but got 1"):
        lr_scheduler.LambdaLR(opt, [lambda step: 1.0])
    with pytest.raises(ValueError, match="Starting multiplicative factor"):
        lr_scheduler.LinearLR(opt, start_factor=0.0)
    with pytest.raises(ValueError, match="one more than"):
        lr_scheduler.SequentialLR(opt, [lr_scheduler.StepLR(opt, 1)], milestones=[3])
    with pytest.raises(ValueError, match="index 0, StepLR, has another"):
        lr_scheduler.SequentialLR(opt, [lr_scheduler.StepLR(other, 1)], milestones=[])
    late = lr_scheduler.StepLR(other, 1)
    other.add_param_group({"params": [Parameter()]})
    with pytest.raises(ValueError, match="made for 2 parameter groups, and its optimizer has 3 now"):
        late.step()
