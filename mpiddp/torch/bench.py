"""``mpirun -np 2 python -m mpiddp.torch.bench``: mpiddp and Gloo in the same processes, in turns.

Prints medians, in microseconds, of all-reduces and training steps: the step alone, torch's DistributedDataParallel on
Gloo and on "mpiddp", and mpiddp's own on the torch module, with equal networks, options and batches. Tensors are
rewritten before each all-reduce, untimed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from mpiddp import distributed as mpiddp
from mpiddp.bench.timing import Clock, Way

from . import DistributedDataParallel, symmetric_empty


def _tutorial_net() -> nn.Module:
    features = (nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU())
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))


def _mlp() -> nn.Module:
    layers = (nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    return nn.Sequential(nn.Flatten(), *layers)


_NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "net": _tutorial_net}


def _step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, after_backward: Callable[[], Any] | None = None
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()

    return step


def _send_nothing(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes
    """Leave each bucket as it is (a communication hook): the cost of everything else."""
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def _in_turns(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Return medians in microseconds."""
    clock = Clock(mpiddp.groups.default_group().comm.Dup())
    for way in ways.values():
        clock.each(way.call, 3)  # buckets are laid out anew after the first
    spent = clock.take_turns(ways, rounds)
    clock.close()
    return {name: statistics.median(each for turn in turns for each in turn) * 1e6 for name, turns in spent.items()}


def _report(title: str, found: dict[str, float], base: str) -> None:
    if dist.get_rank() == 0:
        print(title)
        for name, microseconds in found.items():
            print(f"  {name:<28}{microseconds:12.1f} us   {microseconds / found[base]:.2f} of {base}", flush=True)


def _launch_and_wait(x: torch.Tensor) -> None:
    dist.all_reduce(x, async_op=True).wait()


def _all_reduces(gloo: Any, rounds: int) -> None:
    for size_bytes in (8, 32 << 20):
        ours, theirs, shared = (
            torch.zeros(size_bytes // 4),
            torch.zeros(size_bytes // 4),
            symmetric_empty(size_bytes // 4),
        )
        calls = 100 if size_bytes == 8 else 3
        ways = {
            "gloo": Way(functools.partial(dist.all_reduce, theirs, group=gloo), calls, theirs.zero_),
            "mpiddp": Way(functools.partial(dist.all_reduce, ours), calls, ours.zero_),
            "mpiddp, async_op": Way(functools.partial(_launch_and_wait, ours), calls, ours.zero_),
            "mpiddp, symmetric_empty": Way(functools.partial(dist.all_reduce, shared), calls, shared.zero_),
        }
        _report(f"all_reduce, {size_bytes} bytes", _in_turns(ways, rounds), "gloo")


def _steps(gloo: Any, name: str, batch: int, rounds: int, parts: bool) -> None:
    images, labels = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return _NETWORKS[name]()

    torchs = functools.partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
    wrapped: dict[str, nn.Module] = {
        "step alone": model(),
        "torch DDP on gloo": torchs(model(), process_group=gloo),
        "torch DDP on mpiddp": torchs(model()),
        "mpiddp's DDP": DistributedDataParallel(model()),
    }
    if parts:
        wrapped["torch DDP, nothing sent"] = torchs(model())
        wrapped["torch DDP, nothing sent"].register_comm_hook(None, _send_nothing)
    ways = {each: Way(_step(one, images, labels), 5) for each, one in wrapped.items()}
    if parts:
        count = sum(each.numel() for each in model().parameters())
        shared, ordinary = symmetric_empty(count).zero_(), torch.zeros(count)
        ways["step, barrier"] = Way(_step(model(), images, labels, dist.barrier), 5)
        ways["step, all_reduce"] = Way(_step(model(), images, labels, lambda: dist.all_reduce(ordinary)), 5)
        ways["step, symmetric all_reduce"] = Way(_step(model(), images, labels, lambda: dist.all_reduce(shared)), 5)
    found = _in_turns(ways, rounds)
    _report(f"step of {name}, {batch} images a rank", found, "torch DDP on gloo")
    cost = found["torch DDP on gloo"] - found["step alone"]
    for each in ("torch DDP on mpiddp", "mpiddp's DDP"):
        if dist.get_rank() == 0:
            print(f"  {each} wins back {(found['torch DDP on gloo'] - found[each]) / cost:.0%} of what Gloo costs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--parts", action="store_true", help="also what a step's parts cost: waiting, copying, reducing"
    )
    parser.add_argument("--only", choices=["all_reduce", *_NETWORKS], action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("mpiddp")
    gloo = dist.new_group(backend="gloo")
    for name in options.only or ("all_reduce", *_NETWORKS):
        if name == "all_reduce":
            _all_reduces(gloo, options.rounds)
        else:
            _steps(gloo, name, options.batch, options.rounds, options.parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
