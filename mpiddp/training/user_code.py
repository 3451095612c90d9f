"""Code and data that the user names: imports, calls, and a check of model, loss and data before the first step.

Errors become one sentence on all ranks, with the place in the user's code.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mpiddp.autograd import Tensor, no_grad
from mpiddp.data import Dataset
from mpiddp.data.dataset import fetch, targets_of
from mpiddp.typing import Array

from .config import Config, UsageError
from .models import MODELS, TAKES
from .options import nearest
from .train_step import TrainStep
from .trainer import Trainer

_Result = TypeVar("_Result")


def import_string(option: str, name: str) -> Callable[..., Any]:
    """Return the callable ``package.module:callable``; the working directory is searched too; UsageError.

    >>> import_string("--model", "math:sqrt")(4)
    2.0
    """
    module_name, _, attribute = name.partition(":")
    if module_name.startswith("."):
        raise UsageError(
            f"{option} {name}: {module_name!r} is no name of a module; give it as in `import`, without path and .py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # sys.path of the console script lacks it
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise UsageError(
            f"{option} {name}: there is no module {module_name} ({error}), neither here nor installed"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        if hasattr(module, attribute):
            raise UsageError(f"{option} {name}: {attribute!r} is no callable, it is of type {type(found).__name__}")
        raise UsageError(f"{option} {name}: {attribute!r} is not in {module_name}{nearest(attribute, vars(module))}")
    return found  # type: ignore[no-any-return]


def call(option: str, name: str, **arguments: Any) -> Any:
    """UsageError if the callable (see `import_string`) takes other arguments, or raises.

    >>> call("--data", "random:Random", x=3).randrange(1)
    0
    """
    function = import_string(option, name)
    try:
        signature = inspect.signature(function)
    except ValueError:
        signature = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])  # written in C
    try:
        signature.bind(**arguments)
    except TypeError as error:
        shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise UsageError(
            f"{option} {name} is called as {name.partition(':')[2]}({shown}), and has the parameters {signature}:"
            f" {error}"
        ) from error
    return attempt(lambda: function(**arguments), f"{option} {name}")


def attempt(action: Callable[[], _Result], said: str) -> _Result:
    """Run a user's code; its exception becomes a UsageError: ``said``, the error and its place."""
    try:
        return action()
    except UsageError:
        raise
    except Exception as error:
        home = str(Path(__file__).parents[1])
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(home)]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise UsageError(f"{said}: {type(error).__name__}: {error}{notes}{at}") from error


_SAMPLES = 2
"""Two, to find unequal shapes."""
_IGNORED = -100
"""Target that the losses ignore."""


def sanity_check(trainer: Trainer, config: Config, data: tuple[Dataset, Dataset]) -> None:
    """Compute the loss of the first samples of training and test, and check all labels in memory.

    Changes, draws and sends nothing: the model is in evaluation mode. UsageError names what was expected and found.
    """
    train_step, module = trainer.train_step(), trainer.model.module
    module.eval()
    for part, dataset in zip(("training", "test"), data, strict=True):
        _SanityCheck(train_step, config, part).run(dataset)
    module.train()


class _SanityCheck:
    def __init__(self, train_step: TrainStep, config: Config, part: str) -> None:
        self._stepper = train_step
        self._model = f"--model {config.model}"
        self._data = f"--data {config.data}"
        self._part = part
        module = train_step.model.module
        self._takes = TAKES.get(config.model)
        # A user's loss may have targets of any kind.
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
    """Return dtype and shape, without the samples."""
    shape = getattr(x, "shape", None)
    return f"{x.dtype} {tuple(shape[1:])}" if shape else f"of type {type(x).__name__}"


def _described(sample: Any) -> str:
    if isinstance(sample, (tuple, list)):
        inner = ", ".join(_described(each) for each in sample[:4]) + ", ..." * (len(sample) > 4)
        return f"({inner})"
    return f"{sample.dtype} {sample.shape}" if hasattr(sample, "shape") else type(sample).__name__


def _listed(labels: Array) -> str:
    return str(labels[0]) if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
