"""Kernels of which the source is executed, by NumPy: statements ``name = expression;`` of functions and names."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from . import _late
from ._array import check_current, ndarray

_FUNCTIONS: dict[str, Any] = {
    name: getattr(np, name)
    for name in ("add", "multiply", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor", "divide")
}
_FUNCTIONS |= {
    "from_float16": lambda x: x.view(np.float16).astype(np.float32),
    "to_float16": lambda x: np.asarray(x).astype(np.float16).view(np.uint16),
    "from_bfloat16": lambda x: x.view(ml_dtypes.bfloat16).astype(np.float32),
    "to_bfloat16": lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).view(np.uint16),
}


class ElementwiseKernel:
    """A function of elements (``cupy.ElementwiseKernel``)."""

    def __init__(
        self, in_params: str, out_params: str, operation: str, name: str = "kernel", preamble: str = "", **_: Any
    ) -> None:
        self._inputs = [_parameter(each) for each in in_params.split(",")]
        self._outputs = [_parameter(each) for each in out_params.split(",")]
        self._statements = [_statement(each) for each in operation.split(";") if each.strip()]
        unknown = set(re.findall(r"(\w+)\(", operation)) - set(_FUNCTIONS)
        assert not unknown, f"the fake device does not know {unknown}"
        missing = {f for f in re.findall(r"(\w+)\(", operation) if not re.search(rf"\b{f}\(", preamble)}
        assert not missing, f"the preamble does not define {missing}"

    def __call__(self, *args: Any) -> None:
        """Queue it on the current stream."""
        arrays = [each for each in args if isinstance(each, ndarray)]
        check_current(*arrays)
        assert len({each.shape for each in arrays}) == 1, [each.shape for each in arrays]
        names: dict[str, Any] = {}
        for (kind, name), given in zip(self._inputs + self._outputs, args, strict=True):
            if isinstance(given, ndarray):
                assert given.dtype == kind, f"{name} is {given.dtype}, and the kernel says {kind}"
                names[name] = given._host
            else:
                names[name] = kind.type(given)
        outputs = {name for _, name in self._outputs}

        def run() -> None:
            with np.errstate(all="ignore"):
                for target, expression in self._statements:
                    value = eval(expression, dict(_FUNCTIONS), names)
                    if target in outputs:
                        names[target][...] = value
                    else:
                        names[target] = np.array(value)

        _late.get_current_stream().put("run", run)


def _parameter(text: str) -> tuple[np.dtype[Any], str]:
    kind, name = text.split()
    return np.dtype(kind), name


def _statement(text: str) -> tuple[str, str]:
    target, expression = text.split("=")
    return target.strip().removeprefix("auto ").strip(), expression.strip()
