"""Loss layers. Imports ``functional`` and ``module``."""

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Tensor
from mpiddp.typing import Array

from . import functional as F  # noqa: N812 (its customary name)
from .module import Module


class NLLLoss(Module):
    """Negative log-likelihood of classes (:func:`mpiddp.nn.functional.nll_loss`).

    Parameters
    ----------
    weight : array, optional
        Factor of each class, (C); a buffer, so that it moves with the module.
    ignore_index : int, default -100
        Targets of this value count for nothing.
    reduction : {'mean', 'sum', 'none'}
        'mean' divides by the sum of the targets' weights.
    """

    def __init__(self, weight: Array | None = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction
        self.register_buffer("weight", weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """Return the loss of log-probabilities (N, C, ...) for integer classes (N, ...)."""
        return F.nll_loss(input, target, self.weight, self.ignore_index, self.reduction)


class CrossEntropyLoss(NLLLoss):
    """Cross entropy of classes with the softmax of scores (:func:`mpiddp.nn.functional.cross_entropy`).

    Parameters
    ----------
    weight, ignore_index, reduction
        As `NLLLoss` takes them.
    label_smoothing : float, default 0
        Share of the target that is spread evenly over all classes.
    """

    def __init__(
        self,
        weight: Array | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        self.label_smoothing = label_smoothing

    def forward(self, input: Any, target: Any) -> Tensor:
        """Return the loss of scores (N, C, ...) for integer classes (N, ...), or probabilities (N, C, ...)."""
        return F.cross_entropy(input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing)


class _OfValues(Module):
    """What the losses of values share: a reduction."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction


class MSELoss(_OfValues):
    """Squared differences (:func:`mpiddp.nn.functional.mse_loss`).

    Parameters
    ----------
    reduction : {'mean', 'sum', 'none'}
        What becomes of them.
    """

    def forward(self, input: Any, target: Any) -> Tensor:
        """Return the loss of values and targets of one shape."""
        return F.mse_loss(input, target, self.reduction)


class L1Loss(_OfValues):
    """Absolute differences (:func:`mpiddp.nn.functional.l1_loss`).

    Parameters
    ----------
    reduction : {'mean', 'sum', 'none'}
        What becomes of them.
    """

    def forward(self, input: Any, target: Any) -> Tensor:
        """Return the loss of values and targets of one shape."""
        return F.l1_loss(input, target, self.reduction)


class SmoothL1Loss(_OfValues):
    """Squared differences where they are small, else absolute (:func:`mpiddp.nn.functional.smooth_l1_loss`).

    Parameters
    ----------
    reduction : {'mean', 'sum', 'none'}
        What becomes of them.
    beta : float, default 1
        What is large.
    """

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        self.beta = beta

    def forward(self, input: Any, target: Any) -> Tensor:
        """Return the loss of values and targets of one shape."""
        return F.smooth_l1_loss(input, target, self.reduction, self.beta)


class BCEWithLogitsLoss(_OfValues):
    """Cross entropy of two classes (:func:`mpiddp.nn.functional.binary_cross_entropy_with_logits`).

    Parameters
    ----------
    weight : array, optional
        Factor of each element; a buffer, so that it moves with the module.
    reduction : {'mean', 'sum', 'none'}
        What becomes of the losses.
    pos_weight : array, optional
        Factor of the targets that are 1; a buffer, too.
    """

    def __init__(self, weight: Array | None = None, reduction: str = "mean", pos_weight: Array | None = None) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """Return the loss of scores, and targets from 0 to 1 of the same shape."""
        return F.binary_cross_entropy_with_logits(input, target, self.weight, self.reduction, self.pos_weight)
