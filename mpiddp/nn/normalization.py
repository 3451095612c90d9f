"""Normalisation layers. Imports ``functional``, ``init``, ``module`` and ``parameter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import is_device_array
from mpiddp.typing import Array, DTypeLike

from . import functional as F  # noqa: N812 (its customary name)
from .module import Module
from .parameter import Parameter


class BatchNorm(Module):
    """What all batch normalisations share: parameters, running statistics and their momentum.

    Parameters
    ----------
    num_features : int
        Channels, the second axis.
    eps : float, default 1e-5
        Added to the variance.
    momentum : float or None, default 0.1
        Share of a batch in the running statistics; None: the mean over all batches.
    affine : bool, default True
        Whether there are a weight and a bias.
    track_running_stats : bool, default True
        Whether statistics are kept; without them evaluation uses the batch's own.
    dtype : dtype, default float32
        Of parameters and statistics.

    Notes
    -----
    A subclass says which shapes it takes in ``ndims``, and may compute the output otherwise in ``normalize``.
    """

    ndims: tuple[int, ...] = ()
    running_mean: Array | None
    running_var: Array | None
    num_batches_tracked: Array | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self.register_parameter("weight", Parameter(np.ones(num_features, dtype)) if affine else None)
        self.register_parameter("bias", Parameter(np.zeros(num_features, dtype)) if affine else None)
        tracked = track_running_stats
        self.register_buffer("running_mean", np.zeros(num_features, dtype) if tracked else None)
        self.register_buffer("running_var", np.ones(num_features, dtype) if tracked else None)
        self.register_buffer("num_batches_tracked", np.zeros((), np.int64) if tracked else None)

    def forward(self, input: Any) -> Tensor:
        """Return the normalised input."""
        if self.ndims and input.ndim not in self.ndims:
            wanted = " or ".join(f"{n}D" for n in self.ndims)
            raise ValueError(f"expected {wanted} input (got {input.ndim}D input)")
        if input.shape[1] != self.num_features:
            raise RuntimeError(f"running_mean should contain {input.shape[1]} elements not {self.num_features}")
        share: Any = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            if self.momentum is None:
                number = self.num_batches_tracked
                share = 1 / (number if is_device_array(number) else float(number))  # to read a device is to wait for it
        return self.normalize(input, self.training or self.running_mean is None, share)

    def normalize(self, input: Any, training: bool, momentum: float) -> Tensor:
        """Return the input normalised with the batch's statistics, which move the running ones, or with those."""
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training, momentum, self.eps
        )

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.running_mean.fill(0)
            self.running_var.fill(1)
            self.num_batches_tracked.fill(0)

    def extra_repr(self) -> str:
        """Return the options."""
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}"
        )


class BatchNorm1d(BatchNorm):
    """Batch normalisation of (N, C) or (N, C, L)."""

    ndims = (2, 3)


class BatchNorm2d(BatchNorm):
    """Batch normalisation of images (N, C, H, W)."""

    ndims = (4,)


class LayerNorm(Module):
    """Normalisation over the last axes.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        Lengths of these axes.
    eps : float, default 1e-5
        Added to the variance.
    elementwise_affine, bias : bool, default True
        Whether there are a weight, and a bias.
    dtype : dtype, default float32
        Of the parameters.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self.register_parameter("weight", Parameter(np.ones(shape, dtype)) if elementwise_affine else None)
        self.register_parameter("bias", Parameter(np.zeros(shape, dtype)) if elementwise_affine and bias else None)

    def forward(self, input: Any) -> Tensor:
        """Return the normalised input."""
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GroupNorm(Module):
    """Normalisation of each sample (C, ...) over groups of channels.

    Parameters
    ----------
    num_groups, num_channels : int
        Groups, and the channels that they share out.
    eps : float, default 1e-5
        Added to the variance.
    affine : bool, default True
        Whether there are a weight and a bias, one each for a channel.
    dtype : dtype, default float32
        Of the parameters.

    Raises
    ------
    ValueError
        If the channels cannot be shared out evenly.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(f"num_channels ({num_channels}) must be divisible by num_groups ({num_groups})")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.register_parameter("weight", Parameter(np.ones(num_channels, dtype)) if affine else None)
        self.register_parameter("bias", Parameter(np.zeros(num_channels, dtype)) if affine else None)

    def forward(self, input: Any) -> Tensor:
        """Return the normalised input (N, C, ...)."""
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
