"""A tensor on another device or of another dtype."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any, Self

import numpy as np

from mpiddp.device.conversion import Conversion, conversion
from mpiddp.device.place import place_of
from mpiddp.typing import Array, DTypeLike

from .function import Function, constant, is_differentiable, mode, values_of
from .shaping import Shaping


class Convert(Function):
    """``a`` with another device or dtype."""

    def forward(self, a: Array, convert: Conversion) -> Array:
        self.back = Conversion("kept" if convert.place == "kept" else place_of(a), a.dtype)
        return convert(a)

    def backward(self, grad: Array) -> Array:
        return self.back(grad)


class Conversions(Shaping):
    """A tensor's conversions; gradients flow back."""

    def to(self, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False) -> Self:
        """Return the values on another device, with another dtype, or both; gradients flow back.

        ``device`` is ``"cpu"``, ``"cuda"``, ``"cuda:N"``, N, a dtype, or an object with both. ``copy`` copies even
        if nothing changes. ``non_blocking`` is ignored: only copies to the host wait.
        """
        convert = conversion(values_of(device), dtype)
        if convert.place == "kept" and self.data.dtype == convert.dtype:
            return self.clone() if copy else self
        if self.requires_grad and mode.enabled and (convert.dtype is None or is_differentiable(convert.dtype)):
            result = Convert.apply(self, convert)
        else:
            result = constant(convert(self.data))
        if result.data is self.data:
            return self.clone() if copy else self
        return result

    def cpu(self) -> Self:
        """Return the values on the host."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """Return the values on a GPU, by default the current one."""
        return self.to("cuda" if device is None else device)

    def astype(self, dtype: DTypeLike) -> Self:
        """Return the values with another dtype."""
        return self.to(np.dtype(dtype))

    def long(self) -> Self:
        """Return the values as int64."""
        return self.to(np.int64)

    def float(self) -> Self:
        """Return the values as float32."""
        return self.to(np.float32)
