"""Modules: registration, state, modes, hooks, text; layers against torch's with the same state."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.oracle import compare_modules, draw

from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.nn import functional as F  # noqa: N812


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.layers = nn.ModuleList([nn.Linear(27, 8), nn.Linear(8, 4, bias=False)])
        self.scale = nn.Parameter(np.ones(4, np.float32))
        self.register_buffer("offset", np.zeros(4, np.float32))
        self.register_buffer("scratch", np.zeros(1, np.float32), persistent=False)

    def forward(self, x: Any) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = self.layers[0](x.flatten(1)).tanh()
        return self.layers[1](x) * self.scale + self.offset


def test_a_second_base_is_called_by_the_subclass() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    class Both(nn.Module, Named):
        def __init__(self) -> None:
            super().__init__()
            Named.__init__(self, "both")

    assert Both().name == "both"


def test_shared_parameter_is_listed_once_and_saved_under_both_names() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
    assert set(net.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_state_round_trip_writes_into_the_same_arrays() -> None:
    nn.manual_seed(1)
    a, b = Net(), Net()
    a(np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32))
    before = dict(b.state_dict())
    assert b.load_state_dict(copy.deepcopy(a.state_dict())) == ([], [])
    for name, array in b.state_dict().items():
        assert array is before[name]
        np.testing.assert_array_equal(array, a.state_dict()[name])
        assert not np.shares_memory(array, a.state_dict()[name])


def test_load_casts_and_takes_tensors() -> None:
    layer = nn.Linear(2, 1)
    layer.load_state_dict({"weight": Tensor(np.array([[1.0, 2.0]])), "bias": np.array([3.0])})
    assert (
        layer.weight.dtype == np.float32 and layer.weight.data.tolist() == [[1, 2]] and layer.bias.data.tolist() == [3]
    )


def test_load_errors_name_everything_and_change_nothing() -> None:
    layer = nn.Linear(2, 3)
    before = layer.weight.data.copy()
    state = {"weight": np.zeros((2, 2), np.float32), "extra": np.zeros(1)}
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(state)
    text = str(error.value)
    assert text.startswith("Error(s) in loading state_dict for Linear:")
    assert 'Missing key(s) in state_dict: "bias".' in text and 'Unexpected key(s) in state_dict: "extra".' in text
    assert "size mismatch for weight: copying a param with shape (2, 2) from checkpoint" in text and "(3, 2)" in text
    np.testing.assert_array_equal(layer.weight.data, before)
    missing, unexpected = layer.load_state_dict({"extra": np.zeros(1)}, strict=False)
    assert missing == ["weight", "bias"] and unexpected == ["extra"]


def test_train_eval_zero_grad_and_freezing() -> None:
    net = Net()
    assert net.eval() is net and not any(m.training for m in net.modules())
    assert all(m.training for m in net.train().modules())
    net(np.ones((2, 1, 8, 8), np.float32)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    net.requires_grad_(False)
    assert not net(np.ones((2, 1, 8, 8), np.float32)).requires_grad


def test_what_is_replaced_keeps_its_place() -> None:
    net = Net()
    keys = list(net.state_dict())
    assert keys[:3] == ["scale", "offset", "conv1.weight"]
    net.conv1, net.scale = nn.Conv2d(1, 3, 3), nn.Parameter(np.ones(4, np.float32))
    net.register_parameter("scale", nn.Parameter(np.zeros(4, np.float32)))
    net.layers[0] = nn.Linear(27, 8)
    assert list(net.state_dict()) == keys
    net.scale = nn.ReLU()  # of another kind: under the name it is that alone
    assert "scale" not in net.state_dict() and isinstance(net.scale, nn.ReLU)


def test_a_loop_over_the_parameters_may_register_buffers() -> None:
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    for name, parameter in net.named_parameters():
        net.register_buffer(name.replace(".", "_") + "_before", parameter.data.copy())
    for name, _ in net.named_modules():
        net.register_module(f"{name.replace('.', '_')}_twin", nn.ReLU())
    assert [name for name, _ in net.named_parameters()] == names
    assert {name.replace(".", "_") + "_before" for name in names} < dict(net.named_buffers()).keys()


def test_a_copy_gets_and_loses_attributes_of_its_own() -> None:
    net = nn.Linear(2, 1)
    twin = copy.copy(net)
    twin.scale = nn.Parameter(np.ones(1))
    del twin.bias
    assert twin.weight is net.weight
    assert (list(net.state_dict()), list(twin.state_dict())) == (["weight", "bias"], ["weight", "scale"])


def test_the_text_of_a_layer_names_no_missing_buffer() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.register_buffer("mask", None)
    assert repr(layer) == "Linear(in_features=2, out_features=1, bias=None)"


def test_a_part_may_have_a_train_of_its_own() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.norm.training = False
            return self

    net = nn.Sequential(nn.Linear(3, 3), Frozen())
    assert net.train()[0].training and net[1].training and not net[1].norm.training


def test_attributes() -> None:
    net = Net()
    weight = nn.Parameter(np.zeros(2))
    net.scale = weight
    assert net.scale is weight and net.state_dict()["scale"] is weight.data
    net.norm = None
    assert net.norm is None and "norm.weight" not in net.state_dict()
    del net.layers
    assert not hasattr(net, "layers")
    net.offset = np.ones(4, np.float32)
    assert net.state_dict()["offset"] is net.offset
    net.offset = Tensor(np.zeros(4, np.float32))
    assert isinstance(net.offset, np.ndarray) and net.state_dict()["offset"] is net.offset


def test_a_module_needs_no_call_of_the_base() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.Linear(1, 1)

    net = Early()
    assert net.training and list(net.state_dict()) == ["layer.weight", "layer.bias"]
    assert not list(nn.Module().parameters())


MISTAKES: list[tuple[type[Exception], str, Callable[[Net], Any]]] = [
    (TypeError, "cannot assign 'float' as parameter 'scale'", lambda net: setattr(net, "scale", 1.0)),
    (TypeError, "cannot assign 'int' as child module 'norm'", lambda net: setattr(net, "norm", 3)),
    (TypeError, r"object to buffer 'offset' \(array or None required\)", lambda net: setattr(net, "offset", 3)),
    (TypeError, r"object to buffer 'other' \(array or None", lambda net: net.register_buffer("other", [1.0])),
    (AttributeError, "'Net' object has no attribute 'nothing'", lambda net: net.nothing),
    (KeyError, "name can", lambda net: net.register_parameter("a.b", None)),
    (KeyError, "already exists", lambda net: net.register_buffer("forward", None)),
    (NotImplementedError, "missing the required", lambda net: nn.Module()(1)),
]


@pytest.mark.parametrize(("error", "text", "mistake"), MISTAKES, ids=[text for _, text, _ in MISTAKES])
def test_mistakes(error: type[Exception], text: str, mistake: Callable[[Net], Any]) -> None:
    with pytest.raises(error, match=text):
        mistake(Net())


def test_convert_replaces_every_array() -> None:
    net = Net()
    net.conv1.bias.grad = net.conv1.bias.grad_slot = np.zeros(3, np.float32)
    parameters = list(net.parameters())
    assert net.convert(lambda a: a.astype(np.float64) if a.dtype.kind == "f" else a) is net
    assert all(array.dtype == (np.int64 if "tracked" in key else np.float64) for key, array in net.state_dict().items())
    assert net.scratch.dtype == np.float64 and net.conv1.bias.grad is None and net.conv1.bias.grad_slot is None
    assert all(p is q for p, q in zip(net.parameters(), parameters, strict=True))
    out = net(np.ones((2, 1, 8, 8)))
    out.sum().backward()
    assert out.dtype == np.float64 and net.scale.grad.dtype == np.float64


def test_to_casts_floats_and_keeps_what_is_so_already() -> None:
    net = Net()
    net.conv1.bias.grad = gradient = np.ones(3, np.float32)
    before = net.state_dict()
    assert net.to("cpu") is net and net.cpu() is net and net.to(np.float32) is net
    assert all(array is before[key] for key, array in net.state_dict().items())
    assert net.conv1.bias.grad is gradient
    net.to("float64")
    assert all(array.dtype == (np.int64 if "tracked" in key else np.float64) for key, array in net.state_dict().items())
    assert net.conv1.bias.grad is None


@pytest.mark.parametrize("wanted", [None, "gpu", "cuda:x", "int32", np.int64, True, 1.5, "cuda:-1"])
def test_to_what_is_no_device_and_no_floating_dtype(wanted: object) -> None:
    with pytest.raises(TypeError, match="to\\(\\) takes"):
        nn.Linear(2, 1).to(wanted)


def test_zero_grad_to_zeros() -> None:
    layer = nn.Linear(2, 1)
    layer.bias.grad = gradient = np.ones(1, np.float32)
    layer.zero_grad(set_to_none=False)
    assert layer.bias.grad is gradient and gradient == 0 and layer.weight.grad is None


def test_apply_goes_from_the_leaves_up() -> None:
    seen: list[str] = []
    nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())).apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["ReLU", "Tanh", "Sequential", "Sequential"]


def test_deepcopy_and_pickle() -> None:
    net = Net()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        for (name, a), (_, b) in zip(net.state_dict().items(), twin.state_dict().items(), strict=True):
            np.testing.assert_array_equal(a, b)
            assert not np.shares_memory(a, b), name
        twin(np.ones((2, 1, 8, 8), np.float32)).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    # Models that were pickled before name these modules.
    assert (nn.Parameter.__module__, nn.Flatten.__module__) == ("mpiddp.nn.parameter", "mpiddp.nn.shaping")


LAYERS: list[tuple[str, list[Any], dict[str, Any], list[tuple[int, ...]]]] = [
    ("Linear", [5, 3], {}, [(4, 5)]),
    ("Linear", [5, 3], {"bias": False}, [(2, 4, 5)]),
    ("Conv2d", [4, 6, (3, 2), (2, 1), 1], {}, [(2, 4, 7, 6)]),
    ("Conv2d", [4, 6, 3], {"bias": False}, [(2, 4, 7, 6)]),
    ("BatchNorm1d", [3], {}, [(5, 3)]),
    ("BatchNorm1d", [3], {"momentum": 0.3}, [(5, 3, 4)]),
    ("BatchNorm2d", [3], {"eps": 1e-3}, [(4, 3, 2, 2)]),
    ("MaxPool2d", [3, 2, 1], {}, [(2, 3, 7, 7)]),
    *((name, [], {}, [(2, 3)]) for name in ("ReLU", "Tanh", "Sigmoid", "Identity")),
    ("Softmax", [1], {}, [(2, 3)]),
    ("LogSoftmax", [1], {}, [(2, 3)]),
    ("Flatten", [], {}, [(2, 3, 4)]),
    ("MSELoss", [], {"reduction": "sum"}, [(4, 3), (4, 3)]),
]


@pytest.mark.parametrize(("name", "args", "options", "shapes"), LAYERS, ids=[f"{c[0]}{c[1]}{c[2]}" for c in LAYERS])
def test_layer(torch: Any, name: str, args: list[Any], options: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    ours, theirs = getattr(nn, name)(*args, **options), getattr(torch.nn, name)(*args, **options)
    for seed, mode in enumerate((True, True, False)):
        inputs = [1 + 2 * x for x in draw(*shapes, seed=seed)]
        compare_modules(ours.train(mode), theirs.train(mode), inputs)


@pytest.mark.parametrize("name", ["NLLLoss", "CrossEntropyLoss"])
def test_losses_of_classes(torch: Any, name: str) -> None:
    labels, options = np.array([0, 2, 1, 1]), {"reduction": "sum"}
    compare_modules(getattr(nn, name)(**options), getattr(torch.nn, name)(**options), [*draw((4, 3)), labels])


def test_batch_norm_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"expected 4D input \(got 2D input\)"):
        nn.BatchNorm2d(3)(np.zeros((2, 3), np.float32))
    with pytest.raises(TypeError, match="momentum should be a float, got None"):
        nn.BatchNorm1d(3, momentum=None)  # type: ignore[arg-type]


def test_the_program_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "mpiddp/nn/README.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    np.testing.assert_allclose(names["Softplus"].apply(np.array([0.0, 1.0])).data, np.log1p(np.exp([0.0, 1.0])))
