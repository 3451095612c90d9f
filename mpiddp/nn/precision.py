"""Mixed precision: matrix products and convolutions in half, sums of many numbers in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace
from mpiddp.optim import Optimizer
from mpiddp.typing import DTypeLike

from . import loss
from .activation import LogSoftmax, Softmax
from .attention import MultiheadAttention
from .conv import Conv2d
from .linear import Linear
from .module import Module
from .normalization import BatchNorm, LayerNorm

HALF = (Linear, Conv2d, MultiheadAttention)
"""Layers whose input, parameters and output are in half precision."""
SINGLE = (BatchNorm, LayerNorm, LogSoftmax, Softmax)
"""Layers whose input is in float32: sums and exponentials lose too much in half."""


class _Again(AbstractContextManager[None]):
    """May be entered again, as torch's autocast: a context manager made of a generator may not."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


class MixedPrecision:
    """Runs a model in half precision; its float32 parameters are the master weights.

    Inside of :meth:`autocast` each layer of `HALF` sees its parameters cast to half, on the tape: gradients arrive in
    float32. Losses are float32; other layers and functions take any dtype. After P. Micikevicius et al.,
    arXiv:1710.03740, and ``torch.autocast``. On the host it is slower than float32, and serves to agree with a GPU.
    Gradients of float16 activations vanish below 6e-8: scale the loss (:class:`GradScaler`, :class:`LossScale`).

    ``dtype`` is float16, or bfloat16 (with ml_dtypes imported); hooks on ``module`` do nothing outside of
    :meth:`autocast`.

    Examples
    --------
    >>> from mpiddp import nn
    >>> layer = nn.Linear(2, 3)
    >>> precision = nn.MixedPrecision(layer, np.float16)
    >>> with precision.autocast():
    ...     output = layer(np.ones((4, 2), np.float32))
    >>> output.sum().backward()
    >>> output.dtype, layer.weight.grad.dtype
    (dtype('float16'), dtype('float32'))
    """

    def __init__(self, module: Module, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._active = False
        self._owners: list[Module] = []
        for layer in module.modules():
            if isinstance(layer, HALF):
                layer.register_forward_pre_hook(self._to_half, with_kwargs=True)
                self._owners.append(layer)
            elif isinstance(layer, SINGLE):
                layer.register_forward_pre_hook(self._to_single, with_kwargs=True)

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context, for any number of blocks: forwards in them run in half precision, backward anywhere."""
        return _Again(self._in_half)

    @contextmanager
    def _in_half(self) -> Iterator[None]:
        kept = [dict(layer._parameters) for layer in self._owners]
        twins: dict[int, Any] = {}  # one for layers that share a parameter
        for layer, parameters in zip(self._owners, kept, strict=True):
            for name, parameter in parameters.items():
                if parameter is not None and parameter.dtype == np.float32:
                    if id(parameter) not in twins:
                        twins[id(parameter)] = parameter.to(self.dtype)
                    layer._parameters[name] = twins[id(parameter)]
        self._active = True
        loss.autocasts += 1
        try:
            yield
        finally:
            self._active = False
            loss.autocasts -= 1
            for layer, parameters in zip(self._owners, kept, strict=True):
                layer._parameters.update(parameters)

    def _to_half(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _cast(args, kwargs, np.dtype(np.float32), self.dtype) if self._active else None

    def _to_single(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _cast(args, kwargs, self.dtype, np.dtype(np.float32)) if self._active else None


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], old: np.dtype[Any], new: np.dtype[Any]) -> Any:
    """Cast arguments of one dtype to another; one object stays one object."""
    twins = {
        id(arg): arg.to(new) if isinstance(arg, Tensor) else arg.astype(new)
        for arg in (*args, *kwargs.values())
        if getattr(arg, "dtype", None) == old
    }
    return tuple(twins.get(id(arg), arg) for arg in args), {key: twins.get(id(x), x) for key, x in kwargs.items()}


class LossScale:
    """Factor of the loss that keeps float16 gradients from vanishing, as large as they can bear.

    ``growth_factor`` multiplies it after ``growth_interval`` good steps, ``backoff_factor`` after an overflow; powers
    of two are exact. It ends at 1, or ``init_scale`` if less: a gradient that overflows there does so without it
    (torch's is halved until every gradient is zero). Ranks agree without a message: averaged gradients are the same
    bits on all.
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
                "a loss scale needs growth_factor > 1 > backoff_factor > 0, init_scale > 0 and growth_interval > 0, got"
                f" {growth_factor}, {backoff_factor}, {init_scale} and {growth_interval}"
            )
        self.scale = float(init_scale)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._least = min(1.0, self.scale)
        self._good_steps = 0

    def update(self, overflow: bool) -> None:
        """Count a step; an overflow with the least factor raises FloatingPointError."""
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
            # An infinite scale would never recover; float32 ends at 2 ** 128.
            self.scale = min(self.scale * self.growth_factor, 2.0**100)
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Return the factor and the count, as plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])


class GradScaler:
    """``torch.amp.GradScaler`` around a :class:`LossScale`: scale the loss, skip steps that overflow.

    ``device`` is ignored: gradients are checked where they lie. If not ``enabled``, ``scale`` returns its argument,
    ``step`` is the optimizer's, the rest does nothing.

    Examples
    --------
    >>> from mpiddp import nn, optim
    >>> layer = nn.Linear(2, 1)
    >>> sgd, scaler = optim.SGD(layer.parameters(), lr=0.1), nn.GradScaler()
    >>> scaler.scale(layer(np.ones((4, 2), np.float32)).sum()).backward()
    >>> scaler.step(sgd)
    >>> scaler.update()
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._scale = LossScale(init_scale, growth_factor, backoff_factor, growth_interval)
        self._enabled = enabled
        self._overflowed: dict[int, bool] = {}
        """By an optimizer's id: a gradient was not finite since the last update."""
        self._stepped: set[int] = set()

    def is_enabled(self) -> bool:
        """Return ``enabled``."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the factor; 1 if disabled."""
        return self._scale.scale if self._enabled else 1.0

    def scale(self, outputs: Any) -> Any:
        """Return a loss, or a list or tuple of them, times the factor."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(output) for output in outputs)
        return outputs * outputs.dtype.type(self._scale.scale)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the factor, once, for example before clipping."""
        if not self._enabled:
            return
        if id(optimizer) in self._stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if id(optimizer) in self._overflowed:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        overflowed = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None:
                    grad *= grad.dtype.type(1 / self._scale.scale)
                    overflowed = overflowed or not bool(array_namespace(grad).isfinite(grad).all())
        self._overflowed[id(optimizer)] = overflowed

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Divide the gradients if ``unscale_`` has not; if all are finite, return the optimizer's step, else None."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called since the last update().")
        if id(optimizer) not in self._overflowed:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        return None if self._overflowed[id(optimizer)] else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Lower the factor after an overflow, raise it after many good steps, or set it.

        An overflow with the least factor raises FloatingPointError.
        """
        if not self._enabled:
            return
        overflowed, self._overflowed = self._overflowed, {}
        self._stepped.clear()
        if new_scale is not None:
            self._scale.scale = float(new_scale)
        elif not overflowed:
            raise RuntimeError("No inf checks were recorded prior to update.")
        else:
            self._scale.update(any(overflowed.values()))

    def state_dict(self) -> dict[str, float]:
        """Return the state of the :class:`LossScale`; empty if disabled."""
        return self._scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Restore a :meth:`state_dict`."""
        if self._enabled:
            self._scale.load_state_dict(state_dict)
