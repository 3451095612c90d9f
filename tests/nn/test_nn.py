"""Whole models: they learn, and their losses follow torch's step by step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mpiddp import nn
from mpiddp.autograd import Tensor, cat
from mpiddp.nn import functional as F  # noqa: N812


def descend(model: nn.Module, rate: float) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data -= np.float32(rate) * parameter.grad
    model.zero_grad()


def network(library: Any) -> Any:
    """The tutorial's network without dropout, whose masks no two libraries share."""
    return library.Sequential(
        library.Conv2d(1, 10, 5),
        library.MaxPool2d(2),
        library.ReLU(),
        library.Conv2d(10, 20, 5),
        library.MaxPool2d(2),
        library.ReLU(),
        library.Flatten(),
        library.Linear(320, 50),
        library.ReLU(),
        library.Linear(50, 10),
        library.LogSoftmax(1),
    )


@pytest.mark.parametrize("slotted", [False, True])
def test_losses_follow_torch(slotted: bool) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    ours, theirs = network(nn), network(torch.nn)
    ours.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    if slotted:
        for parameter in ours.parameters():
            parameter.grad_slot = np.full_like(parameter.data, np.nan)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(8):
        x, y = rng.normal(size=(13, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 13)
        loss = F.nll_loss(ours(x), y)
        loss.backward()
        descend(ours, 0.05)
        optimizer.zero_grad()
        expected = torch.nn.functional.nll_loss(theirs(torch.from_numpy(x)), torch.from_numpy(y))
        expected.backward()
        optimizer.step()
        losses.append((loss.item(), expected.item()))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-4)
    for key, value in theirs.state_dict().items():
        np.testing.assert_allclose(ours.state_dict()[key], value.numpy(), rtol=1e-3, atol=1e-5, err_msg=key)


def test_hooks_come_last_layer_first() -> None:
    model, order = network(nn), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    for _ in range(2):
        F.nll_loss(model(np.zeros((2, 1, 28, 28), np.float32)), np.zeros(2, np.int64)).backward()
    layers = [name.split(".")[0] for name in order]
    assert layers == ["9", "9", "7", "7", "3", "3", "0", "0"] * 2
    assert sorted(order) == sorted([name for name, _ in model.named_parameters()] * 2)


def test_network_with_everything_learns() -> None:
    nn.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.1),
        nn.Conv2d(4, 8, 3, groups=2),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(16, 2),
    )
    rng = np.random.default_rng(0)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    losses = []
    for _ in range(60):
        y = rng.integers(0, 2, 32)
        x = rng.normal(size=(32, 1, 8, 8)).astype(np.float32)
        x[:, :, :4] += y[:, None, None, None]
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        descend(model, 0.2)
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.35 < 0.6 < losses[0]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = self.attend(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]  # (N, H, T, D / H)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores + np.triu(np.full((t, t), -np.inf, np.float32), 1)
        x = x + self.project((F.softmax(scores, -1) @ v).transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(self.norm2(x))


def test_transformer_learns_to_repeat() -> None:
    nn.manual_seed(0)
    table, places = nn.Embedding(7, 16), nn.Embedding(6, 16)
    model = nn.ModuleList([table, places, Block(16, 2), nn.Linear(16, 7)])
    rng, losses = np.random.default_rng(0), []
    for _ in range(100):
        half = rng.integers(0, 7, (16, 3))
        text = np.concatenate([half, half], 1)
        x = table(text) + places(np.arange(6))
        logits = model[3](model[2](x))[:, 2:5]
        loss = F.cross_entropy(logits.reshape(-1, 7), text[:, 3:].ravel())
        loss.backward()
        losses.append(loss.item())
        descend(model, 0.3)
    assert losses[0] > 1.7 and np.mean(losses[-5:]) < 0.8 * losses[0]


def test_cat_in_a_residual_model() -> None:
    a, b = nn.Linear(3, 2), nn.Linear(2, 3)
    x = np.ones((2, 3), np.float32)
    out = cat([a(x), b(a(x))], dim=1)
    assert out.shape == (2, 5)
    out.sum().backward()
    expected = 2 * (1 + b.weight.data.sum(0))  # a's bias reaches both halves
    np.testing.assert_allclose(a.bias.grad, expected, rtol=1e-5)
