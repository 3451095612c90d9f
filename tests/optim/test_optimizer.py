import copy
from typing import Any

import numpy as np
import pytest

from mpiddp.autograd import Tensor
from mpiddp.optim import SGD, Adam, AdamW

SHAPES: list[tuple[int, ...]] = [(3, 4), (5,), (), (2, 1, 3)]

CASES: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adam, {}),
    (Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    (Adam, {"betas": (0.2, 0.99), "weight_decay": 0.1}),
    (AdamW, {}),
    (AdamW, {"lr": 0.1, "weight_decay": 0.3}),
]


class Parameter:
    def __init__(self, data: Any, grad: Any = None) -> None:
        self.data, self.grad = np.asarray(data), grad


def train(opt: Any, params: list[Any], seed: int, steps: int, missing: float = 0.0, as_grad: Any = np.asarray) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for param in params:
            grad = np.asarray(rng.standard_normal(tuple(param.data.shape)))
            param.grad = as_grad(grad) if rng.random() >= missing else None
        opt.step()


def start(dtype: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [np.asarray(rng.standard_normal(shape), dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_equals_torch(torch: Any, cls: Any, options: dict[str, Any], dtype: str) -> None:
    params = [Parameter(data.copy()) for data in start(dtype)]
    theirs = [torch.nn.Parameter(torch.tensor(data)) for data in start(dtype)]
    mine, twin = cls(params, **options), getattr(torch.optim, cls.__name__)(theirs, **options)
    steps, missing = 50, 0.2
    train(mine, params, 1, steps, missing, lambda grad: grad.astype(dtype))
    train(twin, theirs, 1, steps, missing, lambda grad: torch.tensor(grad.astype(dtype)))
    # torch fuses some multiplications with additions, so each step may differ by a rounding of what is added up.
    tolerance = steps * np.finfo(dtype).eps
    for param, their in zip(params, theirs, strict=True):
        assert param.data.dtype == dtype
        np.testing.assert_allclose(param.data, their.detach().numpy(), rtol=tolerance, atol=4 * tolerance)
        my_state, their_state = mine.state[param], twin.state[their]
        assert my_state.keys() == {key for key, value in their_state.items() if value is not None}
        for name, value in my_state.items():
            np.testing.assert_allclose(value, their_state[name].numpy(), rtol=tolerance, atol=4 * tolerance)
    # Another optimizer goes on from torch's state, its options included.
    state = twin.state_dict()
    arrays = {
        index: {key: value.numpy().copy() for key, value in record.items() if value is not None}
        for index, record in state["state"].items()
    }
    kept = copy.deepcopy(arrays)
    resumed = [Parameter(their.detach().numpy().copy()) for their in theirs]
    other = cls(resumed)
    other.load_state_dict({"state": arrays, "param_groups": state["param_groups"]})
    train(other, resumed, 2, 5, as_grad=lambda grad: grad.astype(dtype))
    train(twin, theirs, 2, 5, as_grad=lambda grad: torch.tensor(grad.astype(dtype)))
    for param, their in zip(resumed, theirs, strict=True):
        np.testing.assert_allclose(param.data, their.detach().numpy(), rtol=tolerance, atol=4 * tolerance)
    np.testing.assert_equal(arrays, kept, "loading must copy")


def test_zero_grad() -> None:
    params = [Parameter(np.ones(2), np.ones(2)), Parameter(np.ones(3))]
    opt = SGD(params)
    grad = params[0].grad
    opt.zero_grad(set_to_none=False)
    assert params[0].grad is grad and not grad.any() and params[1].grad is None
    opt.zero_grad()
    assert params[0].grad is None and params[1].grad is None


def test_closure() -> None:
    param = Parameter(np.ones(2))

    def closure() -> float:
        param.grad = np.ones(2)
        return 7.0

    assert SGD([param], lr=0.5).step(closure) == 7.0
    assert param.data.tolist() == [0.5, 0.5]
    assert SGD([param]).step() is None


def test_groups_are_added_and_changed_while_training() -> None:
    first, second = Parameter(np.ones(2), np.ones(2)), Parameter(np.ones(2), np.ones(2))
    opt = SGD((p for p in [first]), lr=0.5)
    opt.add_param_group({"params": second, "lr": 0.25})
    opt.step()
    assert first.data.tolist() == [0.5, 0.5] and second.data.tolist() == [0.75, 0.75]
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    assert first.data.tolist() == [0.5, 0.5] and second.data.tolist() == [0.5, 0.5]


PARAM, OF_TORCH = Parameter(np.ones(2)), Parameter(0)
OF_TORCH.data = type("Tensor", (), {"__module__": "torch", "__dlpack__": None})()


@pytest.mark.parametrize(
    ("error", "said", "params", "options"),
    [
        (ValueError, "optimizer got an empty parameter list", [], {}),
        (TypeError, "one of the params is int", [3], {}),
        (ValueError, "can't optimize a non-leaf Tensor", [Tensor(np.ones(2), requires_grad=True) * 2], {}),
        (TypeError, r"got torch\.Tensor: .*mpiddp\.torch\.DistributedDataParallel", [OF_TORCH], {}),
        (ValueError, "twice", [PARAM, PARAM], {}),
        (ValueError, "more than one parameter group", [{"params": [PARAM]}, {"params": [PARAM]}], {}),
        *((ValueError, "Invalid learning rate", [PARAM], {"lr": lr}) for lr in (-1.0, float("inf"))),
        (ValueError, "Invalid momentum", [PARAM], {"momentum": -0.1}),
        (ValueError, "Invalid weight_decay", [PARAM], {"weight_decay": float("nan")}),
        (ValueError, "Nesterov momentum requires a momentum and zero dampening", [PARAM], {"nesterov": True}),
        (ValueError, r"Invalid beta parameter at index 1: 1\.0", [PARAM], {"betas": (0.9, 1.0)}),
    ],
)
def test_misuse(error: type[Exception], said: str, params: list[Any], options: dict[str, Any]) -> None:
    with pytest.raises(error, match=said):
        (Adam if "betas" in options else SGD)(params, **options)


def test_loading_what_does_not_fit() -> None:
    params = [Parameter(np.ones(2), np.ones(2)), Parameter(np.ones(3), np.ones(3))]
    opt = SGD(params, momentum=0.9)
    opt.step()
    state = opt.state_dict()
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, and the optimizer has \[1, 1\]"):
        SGD([{"params": params[:1]}, {"params": params[1:]}]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, and the optimizer has \[1\]"):
        SGD(params[:1]).load_state_dict(state)
    turned = SGD(params[::-1])
    with pytest.raises(ValueError, match=r"'momentum_buffer' of parameter 0 has shape \(2,\), not \(3,\)"):
        turned.load_state_dict(state)
    assert not turned.state


def test_half_precision_stays_half_precision() -> None:
    param = Parameter(np.ones(3, np.float16), np.full(3, 0.5, np.float16))
    for opt in (SGD([param], momentum=0.9, weight_decay=0.1), AdamW([param])):
        opt.step()
        assert {value.dtype for name, value in opt.state[param].items() if name != "step"} == {np.dtype(np.float16)}
