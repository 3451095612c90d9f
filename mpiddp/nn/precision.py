"""Mixed precision: matrix products and convolutions in half, everything that adds up many numbers in float32.

Imports ``autograd`` and the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.typing import DTypeLike

from .activation import LogSoftmax, Softmax
from .attention import MultiheadAttention
from .conv import Conv2d
from .linear import Linear
from .module import Module
from .normalization import BatchNorm, GroupNorm, LayerNorm

HALF = (Linear, Conv2d, MultiheadAttention)
"""Layers that see their input and their parameters in half precision; their outputs are in half."""
SINGLE = (BatchNorm, GroupNorm, LayerNorm, LogSoftmax, Softmax)
"""Layers that see their input in float32; sums and exponentials lose too much in half."""


class MixedPrecision:
    """Runs a model in half precision, whose parameters stay what they are: the master weights.

    Inside of :meth:`autocast` each layer of `HALF` sees its parameters cast to half, and the cast is on the tape: a
    gradient comes back to the float32 parameter as float32, so averaging, clipping, optimizer and checkpoint know
    nothing of it. Other layers and functions take what they get: rectifiers, pools and dropout stay in half.

    Parameters
    ----------
    module : Module
        The model; gets hooks, which do nothing outside of :meth:`autocast`.
    dtype : dtype
        float16, or bfloat16 (with the package ml_dtypes imported).

    Notes
    -----
    On the host half precision is for agreement with a GPU's results, not for speed: products are computed in float32
    and rounded, which takes longer than float32 alone. Gradients of float16 activations vanish below 6e-8: multiply the
    loss by a scale (:class:`GradScaler`).

    References
    ----------
    P. Micikevicius et al., Mixed precision training, ICLR 2018. ``torch.autocast``.

    Examples
    --------
    >>> from mpiddp import nn
    >>> layer = nn.Linear(2, 3)
    >>> precision = nn.MixedPrecision(layer, np.float16)
    >>> with precision.autocast():
    ...     output = layer(np.ones((4, 2), np.float32))
    >>> output.sum().backward()
    >>> output.dtype, layer.weight.dtype, layer.weight.grad.dtype
    (dtype('float16'), dtype('float32'), dtype('float32'))
    """

    def __init__(self, module: Module, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._active = False
        self._owners: list[Module] = []
        for layer in module.modules():
            if isinstance(layer, HALF):
                layer.register_forward_pre_hook(self._to_half, with_kwargs=True)
                # Those of MultiheadAttention's own projection too, which is a Linear and comes by itself.
                self._owners.append(layer)
            elif isinstance(layer, SINGLE):
                layer.register_forward_pre_hook(self._to_single, with_kwargs=True)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run forwards inside of the block in half precision; backward may be anywhere."""
        kept = [dict(layer._parameters) for layer in self._owners]
        twins: dict[int, Any] = {}  # one for a parameter that several layers share
        for layer, parameters in zip(self._owners, kept, strict=True):
            for name, parameter in parameters.items():
                if parameter is not None and parameter.dtype == np.float32:
                    if id(parameter) not in twins:
                        twins[id(parameter)] = parameter.to(self.dtype)
                    layer._parameters[name] = twins[id(parameter)]
        self._active = True
        try:
            yield
        finally:
            self._active = False
            for layer, parameters in zip(self._owners, kept, strict=True):
                layer._parameters.update(parameters)

    def _to_half(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _cast(args, kwargs, np.dtype(np.float32), self.dtype) if self._active else None

    def _to_single(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _cast(args, kwargs, self.dtype, np.dtype(np.float32)) if self._active else None


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], old: np.dtype[Any], new: np.dtype[Any]) -> Any:
    """Return arguments with tensors and arrays of one dtype in another; the same object stays one object."""
    twins = {
        id(arg): arg.to(new) if isinstance(arg, Tensor) else arg.astype(new)
        for arg in (*args, *kwargs.values())
        if getattr(arg, "dtype", None) == old
    }
    return tuple(twins.get(id(arg), arg) for arg in args), {key: twins.get(id(x), x) for key, x in kwargs.items()}


class GradScaler:
    """The factor of the loss that keeps float16 gradients from vanishing, as large as they can bear.

    Parameters
    ----------
    init_scale : float, default 65536
        The first factor; a power of two, with which multiplying is exact.
    growth_factor, backoff_factor : float, default 2 and 0.5
        What the factor is multiplied with after many good steps, and after an overflow.
    growth_interval : int, default 2000
        How many good steps are many.

    Raises
    ------
    ValueError
        If a factor or the interval is none.

    Notes
    -----
    The factor comes down to 1 and no further, unless it began below: a gradient that overflows there does so without
    it, and torch's would be halved until every gradient is zero.

    Ranks agree without a message of their own: averaged gradients are the same bits on all of them, and an overflow on
    one is an overflow of the average.

    References
    ----------
    ``torch.amp.GradScaler``.

    Examples
    --------
    >>> scaler = GradScaler(init_scale=8.0, growth_interval=2)
    >>> for overflow in (True, False, False):
    ...     scaler.update(overflow)
    ...     print(scaler.scale)
    4.0
    4.0
    8.0
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (growth_factor > 1 > backoff_factor > 0 and growth_interval > 0 and init_scale > 0):
            raise ValueError(
                "GradScaler needs growth_factor > 1 > backoff_factor > 0, init_scale > 0 and growth_interval > 0, got"
                f" {growth_factor}, {backoff_factor}, {init_scale} and {growth_interval}"
            )
        self.scale = float(init_scale)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._least = min(1.0, self.scale)
        self._good_steps = 0

    def update(self, overflow: bool) -> None:
        """Take note of a step: its gradients were finite, or not.

        Raises
        ------
        FloatingPointError
            If they were not with the least factor that there is.
        """
        if overflow:
            self._good_steps = 0
            if self.scale <= self._least:
                raise FloatingPointError(
                    f"gradients are not finite with a scale of {self.scale:g}, and a smaller one does not help: lower"
                    " the learning rate, or look for what makes them infinite"
                )
            self.scale = max(self.scale * self.backoff_factor, self._least)
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            # float32's largest number is 2 ** 128; a gradient times infinity would never be finite again.
            self.scale = min(self.scale * self.growth_factor, 2.0**100)
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Return what changes, as plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on where `state_dict` was called."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
