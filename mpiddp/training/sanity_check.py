"""A check before the first step that the model, its loss and the data go together."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpiddp.autograd import no_grad
from mpiddp.data import Dataset
from mpiddp.data.dataset import fetch

from .config import Config, UsageError
from .models import TAKES
from .train_step import TrainStep
from .trainer import Trainer
from .user_code import attempt


def sanity_check(trainer: Trainer, config: Config, data: tuple[Dataset, Dataset]) -> None:
    """Compute the loss of the first two samples of training and test, as the first step will.

    It changes, draws and sends nothing, because the model is in evaluation mode. The UsageError says what model and
    data there are, and has the text and the place of the error.
    """
    step, module = trainer.train_step(), trainer.model.module
    takes = f" takes {TAKES[config.model]}, and" if config.model in TAKES else " cannot take this:"
    module.eval()
    for part, dataset in zip(("training", "test"), data, strict=True):
        where = f"--data {config.data}, {part} data"
        two = range(min(2, len(dataset)))  # two samples may have unequal shapes
        batch = attempt(partial(fetch, dataset, two), f"{where}: the first samples cannot be made a batch")
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise UsageError(f"{where}: expected samples (input, target), found {_shape(batch)}")
        inputs, targets = step.placed(tuple(batch))
        samples = f"--data {config.data} has {part} samples {_shape(inputs)} with targets {_shape(targets)}"
        attempt(partial(_first_loss, step, inputs, targets), f"--model {config.model}{takes} {samples}")
    module.train()


@no_grad()
def _first_loss(step: TrainStep, inputs: Any, targets: Any) -> None:
    output = step.predict(inputs)
    step.loss_fn(output, targets).item()
    float(step.correct_fn(output, targets))


def _shape(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return f"{x.dtype} {tuple(shape[1:])}" if shape else f"of type {type(x).__name__}"
