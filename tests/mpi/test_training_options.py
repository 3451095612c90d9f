"""What each option of a training run does, against torch or a plain loop on one rank, which know nothing of ranks."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn
from mpiddp.data import ArrayDataset, DataLoader, GlobalBatchSampler, digits
from mpiddp.nn import functional as F  # noqa: N812
from mpiddp.optim import SGD
from mpiddp.parallel import SyncBatchNorm
from mpiddp.training import Config, Trainer, UsageError
from mpiddp.training.averaging import NaiveAveraging
from mpiddp.training.building import build_trainer
from mpiddp.training.keeper import Keeper
from mpiddp.training.models import MLP, ResNet

SAMPLES, BATCH, EPOCHS = 29, 4, 2
"""29 = 7 * 4 + 1: the last batch leaves all ranks but one without a sample; 8 batches are windows of 3, 3 and 2."""
SEED = 5


@functools.cache
def data() -> tuple[ArrayDataset, ArrayDataset]:
    train, test = digits(), digits(train=False)
    return ArrayDataset(*train.batch(np.arange(SAMPLES))), ArrayDataset(*test.batch(np.arange(20)))


def configured(**options) -> Config:
    defaults = {"model": "mlp", "dropout": 0.0, "lr": 0.1, "batch_size": BATCH, "epochs": EPOCHS, "seed": SEED}
    return Config(**{**defaults, **options})


def trained(**options) -> Trainer:
    config = configured(**options)
    trainer = build_trainer(config, data())
    trainer.fit(config.epochs)
    return trainer


def batches(epoch: int, seed: int = SEED, size: int = BATCH):
    """Yield an epoch's batches, whole."""
    sampler = GlobalBatchSampler(range(SAMPLES), size, num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return [data()[0].batch(indices) for indices in sampler]


def windows(epoch: int, accumulate: int):
    """Yield what makes a step: the samples of some batches, as one large batch."""
    listed = batches(epoch)
    for start in range(0, len(listed), accumulate):
        xs, ys = zip(*listed[start : start + accumulate], strict=True)
        yield np.concatenate(xs), np.concatenate(ys)


def torchs(config: Config) -> list[np.ndarray]:
    """Train torch's network with torch's optimizers as a configuration says, in one process."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    nn.manual_seed(config.seed)
    state = {name: torch.tensor(x) for name, x in MLP(0.0).state_dict().items()}
    layers = torch.nn.Sequential(
        torch.nn.Flatten(),
        *(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Identity()),
        *(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Identity()),
        torch.nn.Linear(256, 10),
    )
    layers.load_state_dict({name.removeprefix("layers."): x for name, x in state.items()})
    adam = {"betas": (config.momentum, config.beta2)}
    kind, options = {
        "sgd": (torch.optim.SGD, {"momentum": config.momentum}),
        "adam": (torch.optim.Adam, adam),
        "adamw": (torch.optim.AdamW, adam),
    }[config.optimizer]
    optimizer = kind(layers.parameters(), lr=config.lr, weight_decay=config.weight_decay, **options)
    steps = [window for epoch in range(config.epochs) for window in windows(epoch, config.accumulate)]
    for step, (x, y) in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step, len(steps))
        loss = torch.nn.functional.cross_entropy(
            layers(torch.tensor(x)), torch.tensor(y), label_smoothing=config.label_smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), config.clip_norm)
        optimizer.step()
    return [p.detach().numpy() for p in layers.parameters()]


def rate(config: Config, step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0, in words of our own."""
    warm = config.warmup_steps
    if step < warm:
        return config.lr * (step + 1) / (warm + 1)
    if config.schedule == "cosine":
        share = (step - warm) / (steps - warm)
        return config.lr_min + (config.lr - config.lr_min) * 0.5 * (1 + np.cos(np.pi * share))
    if config.schedule == "step":
        return config.lr * config.decay ** (step // (steps // config.epochs) // config.decay_epochs)
    return config.lr


OPTIONS = {
    "lr": {"lr": 0.2},
    "seed": {"batch_size": BATCH, "momentum": 0.0},
    "momentum": {"momentum": 0.5},
    "weight_decay": {"weight_decay": 0.3},
    "adam": {"optimizer": "adam", "lr": 0.001},
    "betas": {"optimizer": "adam", "lr": 0.001, "momentum": 0.5, "beta2": 0.9},
    "adamw": {"optimizer": "adamw", "lr": 0.001, "weight_decay": 3.0},
    "zero": {"optimizer": "adam", "lr": 0.001, "zero": True},
    "zero sgd": {"zero": True, "schedule": "cosine"},
    "accumulate": {"accumulate": 3},
    "accumulate all": {"accumulate": 100},
    "accumulate naive": {"accumulate": 3, "average": "naive"},
    "clip_norm": {"clip_norm": 0.2},
    "clip_norm, accumulated": {"clip_norm": 0.2, "accumulate": 2},
    "label_smoothing": {"label_smoothing": 0.4},
    "warmup_steps": {"warmup_steps": 5},
    "cosine": {"schedule": "cosine", "lr_min": 0.03},
    "warm-up and cosine": {"schedule": "cosine", "warmup_steps": 3, "accumulate": 2},
    "step": {"schedule": "step", "decay_epochs": 1, "decay": 0.2},
    "warm-up and step": {"schedule": "step", "decay_epochs": 1, "decay": 0.2, "warmup_steps": 3},
}


def distance(one, two) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(one, two, strict=True))


def apart(one, two) -> float:
    """Return how far two ends of a training are apart, as a share of the way to the second.

    A unit of a ReLU that lies within rounding of its kink changes single parameters by far more than rounding.
    """
    nn.manual_seed(SEED)
    began = [p.data for p in MLP(0.0).parameters()]
    between = sum(float(np.square(x - y).sum()) for x, y in zip(one, two, strict=True))
    return (between / sum(float(np.square(x - y).sum()) for x, y in zip(two, began, strict=True))) ** 0.5


@pytest.mark.parametrize("name", OPTIONS)
def test_option_is_torchs(world, name):
    expected = torchs(configured(**OPTIONS[name]))
    found = [p.data for p in trained(**OPTIONS[name]).model.module.parameters()]
    assert apart(found, expected) < 0.03
    if name != "lr":
        assert apart(torchs(configured()), expected) > 0.5, "or this test could not fail"


def by_hand(hook, **options) -> list[np.ndarray]:
    """Train with a hook on all ranks, by a loop that knows nothing of Trainer."""
    nn.manual_seed(SEED)
    model = dist.DistributedDataParallel(MLP(0.0))
    if hook is not None:
        model.register_comm_hook(*hook())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            mine = slice(dist.get_rank(), None, dist.get_world_size())
            with model.weighted(len(y[mine]), len(y)):
                if len(y[mine]):
                    F.nll_loss(model(x[mine]), y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.data for p in model.parameters()]


def power_sgd(hook):
    return lambda: (dist.PowerSGDState(None, 2, 3, random_seed=SEED), hook)


COMPRESSIONS = {
    "none": None,
    "fp16": lambda: (None, dist.fp16_compress_hook),
    "bf16": lambda: (None, dist.bf16_compress_hook),
    "powersgd": power_sgd(dist.powerSGD_hook),
    "batched-powersgd": power_sgd(dist.batched_powerSGD_hook),
}


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_compression_is_the_hooks(world, compress):
    pytest.importorskip("ml_dtypes")
    expected = by_hand(COMPRESSIONS[compress])
    found = trained(compress=compress, powersgd_rank=2, powersgd_start=3).model.module.parameters()
    assert all(np.array_equal(p.data, x) for p, x in zip(found, expected, strict=True))
    if compress != "none":
        assert distance(expected, by_hand(None)) > 0, "or this test could not fail"


@pytest.mark.parametrize(("rank", "start"), [(1, 3), (2, 5)])
def test_power_sgds_options_count(world, rank, start):
    found = trained(compress="powersgd", powersgd_rank=rank, powersgd_start=start).model.module.parameters()
    assert distance([p.data for p in found], by_hand(power_sgd(dist.powerSGD_hook))) > 0


def test_power_sgd_forgets_a_gradient_that_is_not_finite(world):
    config = configured(compress="powersgd", powersgd_start=2, on_nan="skip")
    trainer = build_trainer(config, data())
    loss_fn = trainer.loss_fn
    trainer.loss_fn = lambda output, y: loss_fn(output, y) * (np.float32(np.inf) if trainer.step == 4 else 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        trainer.fit(EPOCHS)
    assert trainer.skipped == 1 and np.isfinite(trainer.history[-1].loss)
    assert all(np.isfinite(error).all() for error in trainer.stateful["compression"].error_dict.values())


# -- batch normalisation -------------------------------------------------------------------------------------------


def plain_resnet(accumulate: int) -> list[np.ndarray]:
    """Train the residual network on whole batches, as one rank would."""
    nn.manual_seed(SEED)
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    listed = batches(0)
    for start in range(0, len(listed), accumulate):
        window = listed[start : start + accumulate]
        for x, y in window:
            (F.cross_entropy(model(x), y) * (len(y) / sum(len(y) for _, y in window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.parametrize("average", ["ddp", "naive"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_sync_batchnorm_is_batch_norm_of_the_whole_batch(world, accumulate, average):
    options = {"model": "resnet", "epochs": 1, "accumulate": accumulate, "sync_batchnorm": True, "average": average}
    trainer = trained(**options)
    assert any(isinstance(module, SyncBatchNorm) for module in trainer.model.module.modules())
    found, expected = list(trainer.model.module.state_dict().values()), plain_resnet(accumulate)
    assert distance(found, expected) < 3e-3
    if world.size > 1 and average == "ddp":
        other = trained(**options | {"sync_batchnorm": False}).model.module.state_dict().values()
        assert distance(list(other), expected) > 1e-2, "or this test could not fail"


def everybody(value):
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_without_a_sample_keep_step_with_buffers(world, accumulate):
    trainer = trained(model="resnet", accumulate=accumulate)
    found = everybody([x.tobytes() for x in trainer.model.module.state_dict().values()])
    assert all(theirs == found[0] for theirs in found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_ranks_without_a_sample_do_not_warn_of_it(world, label_smoothing):
    trainer = trained(model="resnet", sync_batchnorm=True, epochs=1, label_smoothing=label_smoothing)
    assert np.isfinite(trainer.history[-1].loss)


@pytest.mark.parametrize(
    ("options", "same"),
    [({}, True), ({"forward_sync_buffers": False}, False), ({"broadcast_buffers": False}, False)],
    ids=str,
)
def test_buffers_in_steps(world, options, same):
    """Before a forward all ranks have the first one's statistics, or each its own."""
    trainer = build_trainer(configured(model="resnet", epochs=1, batch_size=8, **options), data())
    seen = []

    def note(module, args):
        seen.append([x.tobytes() for x in trainer.model.module.buffers()])

    trainer.model.module.stem.register_forward_pre_hook(note)
    trainer.fit(1)
    found = everybody(seen[2])  # every rank has had two batches of its own
    assert all(theirs == found[0] for theirs in found) == (same or world.size == 1)


# -- models of one's own, and what DDP does with them --------------------------------------------------------------


class Unused(nn.Module):
    """Has a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(784, 10), nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x.reshape(len(x), -1))


class Apart(nn.Module):
    """Another one on every rank, buffer and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)
        self.layer.bias.data += dist.get_rank()
        self.register_buffer("rank", np.array([dist.get_rank()], np.float32))

    def forward(self, x):
        return self.layer(x.reshape(len(x), -1))


class Regression(nn.Module):
    """Brings a loss, and what is right, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 1)

    def forward(self, x):
        return self.layer(x.reshape(len(x), -1))

    @staticmethod
    def loss_fn(output, y):
        return F.mse_loss(output[:, 0], y.astype(np.float32))

    @staticmethod
    def correct_fn(output, y):
        return len(y) / 2


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    module = ModuleType("models_of_ones_own")
    vars(module).update(Unused=Unused, Apart=Apart, Regression=Regression, wrong=dict, number=3)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def own(name: str, **options) -> Config:
    return configured(**{"model": f"models_of_ones_own:{name}", "dropout": None, "epochs": 1, **options})


def test_a_model_brings_its_own_loss(world):
    trainer = build_trainer(own("Regression", lr=1e-4), data())
    trainer.fit(1)
    assert trainer.history[0].accuracy == 0.5 and trainer.history[0].loss > 5
    with pytest.raises(UsageError, match="loss_fn of its own"):
        build_trainer(own("Regression", label_smoothing=0.1), data())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unusd", "'Unusd' is not in models_of_ones_own; did you mean Unused?"),
        ("number", "'number' is no callable"),
        ("wrong", "has to return an mpiddp.nn.Module, got dict"),
    ],
)
def test_what_is_no_model_is_refused(world, name, said):
    with pytest.raises(UsageError, match=said):
        build_trainer(own(name), data())


def test_unknown_module_is_named(world):
    with pytest.raises(UsageError, match="there is no module nowhere"):
        build_trainer(configured(model="nowhere:Model", dropout=None), data())


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_are_allowed_where_asked(world, option):
    # A batch that gives every rank a sample: one without any is not asked for its gradients.
    trainer = build_trainer(own("Unused", batch_size=SAMPLES, **{option: True}), data())
    trainer.fit(1)
    assert trainer.model.module.idle.weight.grad is None
    trainer = build_trainer(own("Unused", batch_size=SAMPLES), data())
    with pytest.raises(RuntimeError, match="not used in producing loss"):
        trainer.fit(1)


def test_buckets_that_nobody_uses_are_sent_unless_told_otherwise(world):
    def sent(**options):
        trainer = build_trainer(own("Unused", batch_size=SAMPLES, bucket_cap_mb=1e-5, **options), data())
        buckets = []

        def counting(_, bucket):
            buckets.append([p.shape for p in bucket.parameters()])
            return dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)

        trainer.model.register_comm_hook(None, counting)
        trainer.fit(1)
        assert trainer.model.module.idle.weight.grad is None
        return sorted(shape for bucket in buckets for shape in bucket)

    everything, used = [(3,), (3, 3), (10,), (10, 784)], [(10,), (10, 784)]
    assert sent(find_unused_parameters=True) == everything
    assert sent(find_unused_parameters=True, skip_all_reduce_unused_params=True) == used


def test_initial_values_are_the_first_ranks_unless_told_otherwise(world):
    def found(**options):
        module = build_trainer(own("Apart", **options), data()).model.module
        mean = float(module.layer.bias.data.mean())
        return [round(each - everybody(mean)[0]) for each in everybody(mean)], everybody(float(module.rank[0]))

    alike, ranks = [0] * world.size, list(range(world.size))
    assert found() == (alike, [0.0] * world.size)
    assert found(init_sync=False) == (ranks, ranks)
    assert found(broadcast_buffers=False) == (alike, ranks)


@pytest.mark.parametrize(
    ("options", "buckets"),
    [({}, 1), ({"bucket_cap_mb": 0.2}, 3), ({"bucket_cap_mb_list": (0.01, 0.3)}, 3), ({"bucket_cap_mb": 99.0}, 1)],
    ids=str,
)
def test_bucket_caps(world, options, buckets):
    trainer = trained(epochs=1, **options)
    sizes = trainer.model.bucket_sizes_bytes()
    assert len(sizes) == buckets, sizes
    caps = options.get("bucket_cap_mb_list", (options.get("bucket_cap_mb", 25),))
    assert trainer.model.logging_data()["bucket_cap_bytes"] == int(caps[-1] * 2**20)


# -- half precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", ["mlp", "resnet"])
def test_half_precision_trains_alike_on_all_ranks(world, dtype, model):
    pytest.importorskip("ml_dtypes")
    options = {"model": model, "lr": 0.02, "loss_scale": 256.0}
    single, half = trained(**options), trained(**options, dtype=dtype)
    found = everybody([x.tobytes() for x in half.model.module.state_dict().values()])
    assert all(theirs == found[0] for theirs in found)
    assert all(p.dtype == np.float32 for p in half.model.module.parameters())
    assert half.skipped == 0 and half.history[0].loss != single.history[0].loss
    np.testing.assert_allclose(half.history[0].loss, single.history[0].loss, rtol=0.05)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_too_large_a_scale_comes_down_and_the_same_steps_are_left_out_on_all_ranks(world):
    trainer = build_trainer(configured(dtype="float16", loss_scale=2.0**24, lr=0.01), data())
    before = [p.data.copy() for p in trainer.model.module.parameters()]
    seen = []

    def note(_):
        unchanged = all(
            np.array_equal(p.data, x) for p, x in zip(trainer.model.module.parameters(), before, strict=True)
        )
        seen.append((trainer.scaler.scale, trainer.skipped, unchanged))

    trainer.callbacks["step_end"].append(note)
    trainer.fit(EPOCHS)
    assert all(theirs == seen for theirs in everybody(seen))
    assert 2 < trainer.skipped < len(seen) == trainer.step
    for step, (scale, skipped, unchanged) in enumerate(seen, 1):
        assert scale == 2.0 ** (24 - skipped)
        assert unchanged == (skipped == step)


def test_the_scale_grows(world):
    trainer = trained(dtype="float16", loss_scale=4.0, loss_scale_steps=3)
    assert trainer.step == 16 and trainer.skipped == 0 and trainer.scaler.scale == 4.0 * 2**5


def test_a_gradient_that_no_scale_mends_stops(world):
    trainer = build_trainer(configured(dtype="float16", loss_scale=2.0), data())
    broken = trainer.model.module.layers[1].bias
    broken.register_hook(lambda grad: grad * np.float32(np.nan))
    with pytest.raises(FloatingPointError, match=r"averaged gradient of layers\.1\.bias is not finite at step 2"):
        trainer.fit(1)
    assert trainer.skipped == 1


def test_small_gradients_need_the_scale(world):
    """Losses divided by 2 ** 26 have float16 gradients of zero, unless they are scaled."""

    def moved(scale: float) -> float:
        config = configured(dtype="float16", loss_scale=scale, epochs=1, lr=2.0**20)
        trainer = build_trainer(config, data())
        loss_fn = trainer.loss_fn
        trainer.loss_fn = lambda output, y: loss_fn(output, y) * 2.0**-26
        before = trainer.model.module.layers[1].weight.data.copy()
        trainer.fit(1)
        return float(np.abs(trainer.model.module.layers[1].weight.data - before).max())

    assert moved(1.0) == 0 < moved(2.0**26)


# -- what is not finite --------------------------------------------------------------------------------------------


class Cusp(nn.Module):
    """A finite loss whose gradient is not, where a sample says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(np.ones((1, 1), np.float32)), nn.Parameter(np.ones(1, np.float32))

    def forward(self, x):
        # sqrt at 0 is 0, and its derivative infinite: 0 * inf is NaN.
        return x @ self.weight + self.other + (self.weight * (x.max() < 5)).sum() ** 0.5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("average", ["ddp", "naive"])
def test_whose_gradient_is_not_finite_is_named(world, average):
    x = np.ones((8 * world.size, 1), np.float32)
    guilty = world.size - 1
    x[2 * world.size + guilty] = 9.0  # the third batch, whose last rank gets it
    dataset = ArrayDataset(x, np.ones((len(x), 1), np.float32))
    model = NaiveAveraging(Cusp()) if average == "naive" else dist.DistributedDataParallel(Cusp())
    sampler = GlobalBatchSampler(dataset, world.size, shuffle=False)
    optimizer = SGD(model.module.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_sampler=sampler)
    trainer = Trainer(model, optimizer, F.mse_loss, loader, correct_fn=lambda o, t: 0)
    with pytest.raises(
        FloatingPointError, match=f"gradient of weight is not finite at step 3 .*that of rank {guilty},"
    ):
        trainer.fit(1)
    assert np.isfinite(model.module.weight.data).all()


# -- going on --------------------------------------------------------------------------------------------------------

RESUMED = {
    "schedule, accumulation, clipping, dropout": {
        "schedule": "cosine",
        "warmup_steps": 2,
        "accumulate": 3,
        "clip_norm": 0.5,
        "dropout": 0.3,
    },
    "scaler, zero, adam": {
        "dtype": "float16",
        "loss_scale": 2.0**17,
        "loss_scale_steps": 2,
        "zero": True,
        "optimizer": "adam",
        "lr": 0.001,
        "accumulate": 2,
    },
    "compression, step schedule": {
        "compress": "powersgd",
        "powersgd_start": 2,
        "schedule": "step",
        "decay_epochs": 1,
        "accumulate": 2,
    },
    "batched compression in bfloat16": {"compress": "batched-powersgd", "powersgd_start": 2, "dtype": "bfloat16"},
    "batch norm of all ranks, zero": {"model": "resnet", "sync_batchnorm": True, "zero": True, "accumulate": 3},
    "batch norm of each rank": {"model": "resnet", "accumulate": 3},
}


def bits(trainer: Trainer) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in (trainer.arrays() | trainer.own_arrays()).items()}


def kept(config: Config) -> Keeper:
    return Keeper(config, first=dist.get_rank() == 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_stopped_in_a_window_goes_on_to_the_same_bits(world, tmp_path, name):
    pytest.importorskip("ml_dtypes")
    folder = [tmp_path]
    dist.broadcast_object_list(folder, src=0)
    config = configured(**RESUMED[name], output=folder[0], resume="auto")
    unbroken = build_trainer(config, data())
    unbroken.fit(EPOCHS)

    stopped = build_trainer(config, data())
    loss_fn, asked = stopped.loss_fn, []

    def counted(output, y):
        asked.append(stopped.step)
        return loss_fn(output, y)

    # As a signal that comes to one rank while the first batch of its window runs: rank 0 has a sample in every batch.
    stopped.loss_fn = counted
    at = {1: 6, 2: 4, 3: 3}[config.accumulate]
    stopped.stop = lambda: world.rank == 0 and at in asked
    stopped.fit(EPOCHS)
    # A step of one batch begins with the question, so there the signal came behind it.
    reached = at + 1 + (config.accumulate == 1)
    assert stopped.stopped and stopped.step == reached
    keeper = kept(config)
    keeper.save(stopped)
    keeper.finish()

    nn.manual_seed(99)
    resumed = build_trainer(config, data())
    kept(config).resume(resumed)
    assert resumed.step == reached
    resumed.fit(EPOCHS)
    assert resumed.step == unbroken.step and resumed.skipped == unbroken.skipped
    assert resumed.history[-1].lr == unbroken.history[-1].lr
    assert bits(resumed) == bits(unbroken)
    if resumed.scaler is not None:
        assert resumed.scaler.state_dict() == unbroken.scaler.state_dict() and unbroken.skipped
    assert bits(stopped) != bits(unbroken), "or this test could not fail"


def test_a_changed_plan_holds_from_the_step_that_was_reached(world, tmp_path):
    folder = [tmp_path]
    dist.broadcast_object_list(folder, src=0)
    options = {"schedule": "cosine", "output": folder[0], "resume": "auto", "weight_decay": 0.1}
    config = configured(**options)
    trainer = build_trainer(config, data())
    trainer.fit(1)
    keeper = kept(config)
    keeper.save(trainer)
    keeper.finish()
    longer = configured(**options | {"epochs": 4, "lr": 0.4, "weight_decay": 0.2, "momentum": 0.5})
    resumed = build_trainer(longer, data())
    kept(longer).resume(resumed)
    (group,) = resumed.optimizer.param_groups
    assert group["lr"] == pytest.approx(rate(longer, 8, 32)) and group["lr"] != pytest.approx(rate(config, 8, 16))
    assert (group["weight_decay"], group["momentum"]) == (0.2, 0.5)
