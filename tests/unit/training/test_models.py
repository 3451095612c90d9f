"""The models: the tutorial's network to the letter."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.training.models import MLP, MODELS, Net


def test_net_has_the_tutorials_parameters():
    shapes = {name: p.shape for name, p in Net().named_parameters()}
    assert shapes == {
        "conv1.weight": (10, 1, 5, 5),
        "conv1.bias": (10,),
        "conv2.weight": (20, 10, 5, 5),
        "conv2.bias": (20,),
        "fc1.weight": (50, 320),
        "fc1.bias": (50,),
        "fc2.weight": (10, 50),
        "fc2.bias": (10,),
    }
    assert sum(p.data.size for p in Net().parameters()) == 21840


@pytest.mark.parametrize("name", MODELS)
def test_output_is_log_probabilities(name):
    x = np.random.default_rng(0).standard_normal((3, 1, 28, 28), dtype=np.float32)
    output = MODELS[name](dropout=0.0)(x)
    assert output.shape == (3, 10)
    np.testing.assert_allclose(np.exp(output.data).sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("model", [Net, MLP])
def test_dropout_drops_in_training_only(model):
    nn.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((3, 1, 28, 28), dtype=np.float32)
    module = model(dropout=0.5)
    assert not np.array_equal(module(x).data, module(x).data)
    module.eval()
    assert np.array_equal(module(x).data, module(x).data)
    module = model(dropout=0.0)
    assert np.array_equal(module(x).data, module(x).data)


def test_net_against_torch():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    nn.manual_seed(1)
    module, x = Net(dropout=0.0), np.random.default_rng(0).standard_normal((5, 1, 28, 28), dtype=np.float32)
    target = np.array([0, 9, 3, 3, 7])
    w = {name: torch.tensor(p.data, requires_grad=True) for name, p in module.named_parameters()}
    y = F.relu(F.max_pool2d(F.conv2d(torch.tensor(x), w["conv1.weight"], w["conv1.bias"]), 2))
    y = F.relu(F.max_pool2d(F.conv2d(y, w["conv2.weight"], w["conv2.bias"]), 2)).reshape(5, 320)
    y = F.linear(F.relu(F.linear(y, w["fc1.weight"], w["fc1.bias"])), w["fc2.weight"], w["fc2.bias"])
    loss = F.nll_loss(F.log_softmax(y, dim=1), torch.tensor(target))
    loss.backward()
    ours: Tensor = nn.functional.nll_loss(module(x), target)
    ours.backward()
    np.testing.assert_allclose(ours.item(), loss.item(), rtol=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(p.grad, w[name].grad.numpy(), rtol=2e-4, atol=1e-6, err_msg=name)
