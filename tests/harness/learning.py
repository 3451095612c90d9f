"""Models and batches of the tests of data parallelism, and torch's DDP on Gloo as their oracle."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from harness.world import World, everybody
from mpiddp import nn
from mpiddp.mpi.lazy import MPI
from mpiddp.nn import functional as F  # noqa: N812


def mlp(widths: Sequence[int] = (5, 7, 6, 3), dtype: str = "float32", seed: int = 1) -> nn.Sequential:
    """Return Linear layers with ReLU between, the same on all ranks."""
    nn.manual_seed(seed)
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise(widths):
        layers += [nn.Linear(narrow, wide, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def module(forward: Callable[..., Any], **parameters: np.ndarray) -> nn.Module:
    """Return a module of parameters; its forward is given it and the inputs."""
    made = nn.Module()
    for name, x in parameters.items():
        made.register_parameter(name, nn.Parameter(x))
    made.forward = functools.partial(forward, made)
    return made


def scale() -> nn.Module:
    """Return a module of one weight, whose gradient is the input."""
    return module(lambda model, x: (model.w * x).sum(), w=np.ones(1, np.float32))


def batch(rng: np.random.Generator, n: int, width: int = 5, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return n samples with labels; take the same ``rng`` on all ranks."""
    return rng.standard_normal((n, width)).astype(np.float32), rng.integers(0, classes, n)


def share(x: np.ndarray, rank: int, size: int) -> np.ndarray:
    return x[len(x) * rank // size : len(x) * (rank + 1) // size]


def mine(world: World, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(share(x, world.rank, world.size) for x in arrays)


def step_of(model: nn.Module, x: Any, y: Any) -> float:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return float(loss.item())


def gradients(model: nn.Module) -> dict[str, np.ndarray | None]:
    return {name: None if p.grad is None else p.grad.copy() for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.data.copy() for name, p in model.named_parameters()}


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def assert_same_bits_everywhere(arrays: dict[str, np.ndarray | None]) -> None:
    mine = {name: None if x is None else x.tobytes() for name, x in arrays.items()}
    for rank, theirs in enumerate(everybody(mine)):
        assert theirs == mine, f"rank {rank} has other bits than rank {dist.get_rank()}"


def assert_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def assert_close(one: dict[str, Any], two: dict[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=rtol, atol=atol, err_msg=name)


def import_torch() -> Any:
    """Return torch, on up to three ranks: its import on four takes longer than the tests."""
    if MPI.COMM_WORLD.size > 3:  # also where no test has made the process group yet
        pytest.skip("torch is asked on up to three ranks")
    return pytest.importorskip("torch")


def gloo(least: int = 2) -> Any:
    """Return torch with its default process group on Gloo, whose ranks meet through MPI."""
    torch = import_torch()
    if dist.get_world_size() < least:
        pytest.skip("torch's own averages are asked of two and of three ranks")
    from harness import without_dynamo  # noqa: F401

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        import mpiddp.torch  # noqa: F401 - Gloo's ranks meet through MPI

        torch.distributed.init_process_group("gloo")
    return torch


def torch_mlp(torch: Any, model: nn.Sequential) -> Any:
    layers = [
        torch.nn.Linear(each.in_features, each.out_features) if isinstance(each, nn.Linear) else torch.nn.ReLU()
        for each in model
    ]
    made = torch.nn.Sequential(*layers)
    made.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in model.state_dict().items()})
    return made
