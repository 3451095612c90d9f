"""``try_out``: whether model, loss and data go together, asked of a few samples before the first step.

What does not is the user's to know in one sentence, on all ranks, and not from a traceback of the first that meets it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddp.autograd import Tensor, no_grad
from mpiddp.data import Dataset
from mpiddp.data.dataset import fetch, targets_of
from mpiddp.typing import Array

from .callables import attempt
from .config import Config, UsageError
from .models import MODELS, TAKES
from .step import Stepper
from .trainer import Trainer

_SAMPLES = 2
"""That are tried: two, so that samples of unequal shapes are met."""
_IGNORED = -100
"""The target that the losses take no notice of."""


def try_out(trainer: Trainer, config: Config, data: tuple[Dataset, Dataset]) -> None:
    """Compute the loss of the first samples for training and for the test, and look at all labels that lie in memory.

    Nothing is changed, drawn or sent: the model is in the mode of an evaluation.

    Parameters
    ----------
    trainer : Trainer
        What `build_trainer` has made of the configuration.
    config : Config
        For the names of model and data.
    data : tuple of Dataset
        For training and for the test.

    Raises
    ------
    UsageError
        If samples, model, loss and labels do not fit each other; the text says what was expected and what was found.
    """
    stepper, module = trainer.stepper(), trainer.model.module
    module.eval()
    for part, dataset in zip(("training", "test"), data, strict=True):
        _Trial(stepper, config, part).run(dataset)
    module.train()


class _Trial:
    """The trial of one part of the data."""

    def __init__(self, stepper: Stepper, config: Config, part: str) -> None:
        self._stepper = stepper
        self._model = f"--model {config.model}"
        self._data = f"--data {config.data}"
        self._part = part
        module = stepper.model.module
        self._takes = TAKES.get(config.model)
        # A loss of the user's own may have targets of any kind.
        self._classifies = config.model in MODELS or not hasattr(module, "loss_fn")

    def run(self, dataset: Dataset) -> None:
        samples = min(_SAMPLES, len(dataset))
        where = f"{self._data}, {self._part} data"
        batch = attempt(lambda: fetch(dataset, range(samples)), f"{where}: the first samples cannot be made a batch")
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and hasattr(batch[1], "__len__")):
            raise UsageError(f"{where}: expected samples (input, target), found {_described(dataset[0])}")
        inputs, targets = self._stepper.placed(tuple(batch))
        if self._classifies and not hasattr(targets, "dtype"):
            raise UsageError(f"{where}: expected samples (input, number or array), found {_described(dataset[0])}")
        with no_grad():
            output = self._output(inputs)
            if self._classifies:
                self._check_scores(output, samples)
                self._check_labels(dataset, output.shape[1])
            said = f"{where}: the loss of {self._model} does not take outputs {_shape(output)} and {_shape(targets)}"
            loss = attempt(lambda: self._stepper.loss_fn(output, targets), f"{said} as targets")
            if not isinstance(loss, Tensor) or loss.size != 1:
                raise UsageError(f"{self._model}: its loss_fn has to return a Tensor of one number, not {_shape(loss)}")
            attempt(
                lambda: float(self._stepper.correct_fn(output, targets)),
                f"{self._model}: its correct_fn has to return a number",
            )

    def _output(self, inputs: Any) -> Any:
        """Return what the model makes of inputs."""
        found = f"{self._data} has {self._part} samples {_shape(inputs)}"
        if self._takes is None:
            return attempt(lambda: self._stepper.predict(inputs), f"{self._model} does not take them: {found}")
        try:
            return self._stepper.predict(inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            single = " of float32" if "images" in self._takes and getattr(inputs, "dtype", None) != np.float32 else ""
            raise UsageError(
                f"{self._model} takes {self._takes}{single}, and {found}: give others, or a model that takes these"
                " (--model MODULE:CALLABLE)"
            ) from error

    def _check_scores(self, output: Any, samples: int) -> None:
        if not isinstance(output, Tensor) or output.ndim < 2 or len(output) != samples:
            raise UsageError(
                f"{self._model}: expected a Tensor of scores (n, classes, ...) for n samples, found {_shape(output)}"
                f" for {samples}; return one, or give the Module a loss_fn of its own"
            )

    def _check_labels(self, dataset: Dataset, classes: int) -> None:
        labels = targets_of(dataset)
        if labels is None or labels.dtype.kind not in "iu":
            return
        wrong = np.unique(labels[((labels < 0) | (labels >= classes)) & (labels != _IGNORED)])
        if len(wrong):
            raise UsageError(
                f"{self._data}, {self._part} data: expected labels from 0 to {classes - 1}, for the {classes} classes"
                f" of {self._model}, found {_listed(wrong)}; number them so, or give a model of more classes (--model"
                " MODULE:CALLABLE)"
            )


def _shape(x: Any) -> str:
    """Return what an array of a batch is, in words: its dtype, and its shape without the samples."""
    shape = getattr(x, "shape", None)
    return f"{x.dtype} {tuple(shape[1:])}" if shape else f"of type {type(x).__name__}"


def _described(sample: Any) -> str:
    """Return what a sample is, in words."""
    if isinstance(sample, (tuple, list)):
        inner = ", ".join(_described(each) for each in sample[:4]) + ", ..." * (len(sample) > 4)
        return f"({inner})"
    return f"{sample.dtype} {sample.shape}" if hasattr(sample, "shape") else type(sample).__name__


def _listed(labels: Array) -> str:
    """Return the least and the largest of some labels, where there are several."""
    return str(labels[0]) if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
