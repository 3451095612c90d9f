"""Virtual ranks: bits beside a sum in pairs that each rank computes of all micro-batches by itself."""

import numpy as np
import pytest
from harness.learning import module

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.data import ArrayDataset, DataLoader, GlobalBatchSampler
from mpiddp.nn import functional as F  # noqa: N812

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

V, BATCH, SEED = 7, 12, 3
RNG = np.random.default_rng(8)
DATA = ArrayDataset(RNG.standard_normal((27, 6)).astype(np.float32), RNG.integers(0, 3, 27))
"""Three batches, of which the last one leaves four virtual ranks without a sample."""


class Centred(nn.Module):
    """Subtracts a running mean, a buffer: unlike a batch norm it takes batches of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", np.zeros(6, np.float32))

    def forward(self, x: np.ndarray) -> np.ndarray:
        if self.training:
            self.mean += np.float32(0.1) * (x.mean(axis=0) - self.mean)
        return x - self.mean


def network() -> nn.Module:
    dist.manual_seed(SEED)
    return nn.Sequential(Centred(), nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, 3, bias=False))


def batches(virtual_ranks: int | None) -> DataLoader:
    sampler = GlobalBatchSampler(DATA, BATCH, seed=SEED, virtual_ranks=virtual_ranks)
    return DataLoader(DATA, batch_sampler=sampler)


def in_pairs(parts: list) -> np.ndarray:
    middle = -(-len(parts) // 2)
    return parts[0] if len(parts) == 1 else in_pairs(parts[:middle]) + in_pairs(parts[middle:])


def expected(epochs: int) -> dict[str, np.ndarray]:
    """Train without DDP: each micro-batch from the buffers of before, gradients in pairs, the first one's buffers."""
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        shares = [
            list(GlobalBatchSampler(DATA, BATCH, V, part, seed=SEED + epoch)) for part in range(V)
        ]  # seed and epoch are added
        for index, parts in enumerate(zip(*shares, strict=True)):
            before = [x.copy() for x in model.buffers()]
            total = min(BATCH, len(DATA) - index * BATCH)
            gradients, after = [], []
            for part, chosen in enumerate(parts):
                for x, kept in zip(model.buffers(), before, strict=True):
                    x[...] = kept
                nn.random.set_step(epoch, index, stream=part)
                images, labels = DATA.batch(chosen)
                model.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                weight = np.float32((len(chosen) if part < total else 0) / total)
                gradients.append([p.grad * weight for p in model.parameters()])
                after.append([x.copy() for x in model.buffers()])
            for parameter, *each in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = in_pairs(each)
            for x, kept in zip(model.buffers(), after[0], strict=True):
                x[...] = kept
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model.state_dict()


def same_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()] == []


def test_bits_are_those_of_one_process(world):
    model = dist.DistributedDataParallel(network(), virtual_ranks=V, bucket_cap_mb=1e-4)
    loader, optimizer = batches(V), optim.AdamW(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for micro_batches in model.steps(loader):
            for images, labels in micro_batches:
                F.cross_entropy(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    same_bits(model.module.state_dict(), expected(2))
    assert model.virtual_ranks == V and len(bucket_sizes := model.bucket_sizes_bytes()) > 1, bucket_sizes


def test_parts_of_a_micro_batch_are_added_under_no_sync(world):
    summing = module(lambda model, x: (model.weight * x).sum(), weight=np.zeros(3))
    model = dist.DistributedDataParallel(summing, virtual_ranks=4)
    for virtual_rank in model.own_virtual_ranks:
        with model.micro_batch(virtual_rank, 0):
            with model.no_sync():
                model(virtual_rank).backward()
            model(10).backward()
    assert model.module.weight.grad.tolist() == [11.5] * 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_buckets_and_subnormal_gradients(world, dtype):
    """Weights of 1 / 4 round a subnormal gradient, on whichever rank it is multiplied."""
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((4, 300_000)).astype(dtype)
    gradients[:, ::7] *= np.finfo(dtype).smallest_subnormal * 9
    scaling = module(lambda model, x: model.weight * x, weight=np.zeros(300_000, dtype))
    model = dist.DistributedDataParallel(scaling, virtual_ranks=4)
    for virtual_rank in model.own_virtual_ranks:
        with model.micro_batch(virtual_rank, 0):
            model(gradients[virtual_rank]).sum().backward()
    wanted = in_pairs([each * dtype(0.25) for each in gradients])
    assert model.module.weight.grad.tobytes() == wanted.tobytes()


def test_parameter_that_only_some_micro_batches_use(world):
    either = module(lambda model, x: (model.second if x else model.first).sum(), first=np.zeros(2), second=np.zeros(2))
    model = dist.DistributedDataParallel(either, virtual_ranks=4, find_unused_parameters=True)
    for _ in range(2):
        for virtual_rank in model.own_virtual_ranks:
            with model.micro_batch(virtual_rank, 0):
                if virtual_rank < 3:  # the last one has no backward
                    model(virtual_rank == 1).backward()
        first, second = (p.grad.tolist() for p in model.parameters())
        assert first == [0.5, 0.5] and second == [0.25, 0.25]


def test_misuse_is_said(world):
    model = dist.DistributedDataParallel(network(), virtual_ranks=V)
    x = np.ones((3, 6), np.float32)
    with pytest.raises(RuntimeError, match="trained inside of steps"):
        model(x)
    with (
        pytest.raises(ValueError, match="the next micro-batch of this step is that of virtual rank"),
        model.micro_batch(V, 0),
    ):
        pass
    with pytest.raises(ValueError, match="0 of 0"), model.micro_batch(model.own_virtual_ranks[0], 0, n_samples=0):
        pass
    for refused in (
        lambda: model.register_comm_hook(None, dist.fp16_compress_hook),
        lambda: model.weighted(3).__enter__(),
        lambda: model.join().__enter__(),
    ):
        with pytest.raises(RuntimeError, match="leave it or virtual_ranks out"):
            refused()
    with pytest.raises(ValueError, match=r"steps\(\) needs a DataLoader whose batch_sampler"):
        next(next(model.steps(DataLoader(DATA, batch_size=2))))
    if world.size < V:
        with pytest.raises(ValueError, match="GlobalBatchSampler with virtual_ranks=7"):
            list(map(list, model.steps(batches(None))))
        model._reducer.partial.reset()
    with pytest.raises(ValueError, match="12 samples cannot be divided among 13 virtual ranks"):
        batches(13)
    for virtual_rank in model.own_virtual_ranks:
        with model.micro_batch(virtual_rank, 0):
            losses = [model(x).sum() for _ in range(2)]
            losses[0].backward()
    with pytest.raises(RuntimeError, match="with one backward each, after any others under no_sync"):
        losses[1].backward()
    with pytest.raises(RuntimeError, match="no virtual ranks"):
        dist.DistributedDataParallel(network()).own_virtual_ranks  # noqa: B018
    with pytest.raises(ValueError, match="SyncBatchNorm needs all micro-batches at once"):
        dist.DistributedDataParallel(dist.SyncBatchNorm(6), virtual_ranks=V)
    with pytest.raises(ValueError, match="need parameters of float32 or float64 on the host, and weight is float16"):
        dist.DistributedDataParallel(nn.Linear(2, 2, dtype=np.float16), virtual_ranks=V)
    if world.size > 1:
        with pytest.raises(ValueError, match="1 virtual ranks can be shared by 1 to 1 ranks"):
            dist.DistributedDataParallel(network(), virtual_ranks=1)
