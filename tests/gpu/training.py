"""Training steps of a perceptron 2048 wide, beside torch's on the same GPU, and the main job."""

import functools
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from harness import launcher

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.nn import functional as F  # noqa: N812

from .beside_torch import torch_group
from .machine import torch_fault
from .rows import everywhere, say, seconds
from .sections import environment

INPUTS, CLASSES = 784, 10


def wide() -> nn.Module:
    """Return the perceptron, for ``--model tests.gpu.training:wide`` too."""
    return perceptron(2048, flat=True)


def perceptron(width: int, flat: bool = False) -> nn.Module:
    layers = [nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)]
    return nn.Sequential(*[nn.Flatten()] * flat, *layers)


def batch(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of noise, another one on each rank."""
    rng = np.random.default_rng(dist.get_rank())
    return rng.standard_normal((samples, INPUTS)).astype(np.float32), rng.integers(0, CLASSES, samples)


def our_step(width: int, samples: int) -> Callable[[], float]:
    """Return what makes a step as ``train`` does, on one rank too, and reads its loss."""
    nn.manual_seed(0)
    net = dist.DistributedDataParallel(perceptron(width).convert(cupy.asarray))
    optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x, y = map(cupy.asarray, batch(samples))

    return functools.partial(stepped, net, optimizer, F.cross_entropy, x, y)


def stepped(net: Any, optimizer: Any, loss_fn: Callable[[Any, Any], Any], x: Any, y: Any) -> float:
    loss = loss_fn(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def torch_perceptron(inputs: int, width: int, classes: int) -> Any:
    """Return torch's perceptron, on the GPU."""
    import torch

    widths = (inputs, width, width, classes)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1]).cuda()


def torch_step(width: int, samples: int, data_parallel: bool, group: Any = None) -> Callable[[], float]:
    """Return the same by torch, on one rank without its DDP, else in a group of torch's."""
    import torch

    net = torch_perceptron(INPUTS, width, CLASSES)
    if data_parallel:
        net = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x, y = (torch.from_numpy(each).cuda() for each in batch(samples))

    return functools.partial(stepped, net, optimizer, torch.nn.functional.cross_entropy, x, y)


def compare(small: bool, data_parallel: bool, most: float) -> None:
    """Say our step's time, torch's, and their ratio."""
    width, repeats = (32, 3) if small else (2048, 20)
    fault = torch_fault()
    if not fault and data_parallel:
        torch_group()
    for samples in (8,) if small else (128, 1024):
        step = our_step(width, samples)
        losses = [step() for _ in range(3)]
        falls = everywhere(losses[-1] < losses[0])
        ours = seconds(step, repeats)
        say(f"our step, batch {samples} a rank, width {width}", ours * 1e3, "ms", wrong=not falls)
        if fault:
            say(f"no comparison: torch: {fault}")
            continue
        theirs_step = torch_step(width, samples, data_parallel)
        theirs = seconds(theirs_step, repeats)
        say(f"torch's step{' by DDP with Gloo' * data_parallel}, batch {samples}", theirs * 1e3, "ms")
        say(f"our time over torch's, batch {samples}", ours / theirs, most=most)


def step(small: bool) -> None:
    compare(small, False, 1.2)


def ddp(small: bool) -> None:
    """Compare the steps of all ranks, which share the GPU."""
    compare(small, True, 1.0)


def train(small: bool) -> None:
    """Run the main job on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        model = "mlp" if small else "tests.gpu.training:wide"
        options = ("--epochs", 2, "--data", "synthetic", "--batch-size", 512, "--device", "cuda", "--model", model)
        train = ("-m", "mpiddp", "train", *options, "--metrics", metrics)
        done = launcher.job(*train, ranks=2, limit_s=25, **environment())
        if done.rc:
            say(f"train --device cuda: exit code {done.rc}: {done.stderr.strip()[-600:]}", wrong=True)
            return
        last = json.loads(metrics.read_text().splitlines()[-1])
        said = f"train --device cuda, --model {model}: accuracy {last['accuracy']:.3f}"
        say(said, last["samples_per_s"], "samples/s")
