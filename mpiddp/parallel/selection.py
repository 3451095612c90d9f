"""The selection: the parameters and buffers of a module that DistributedDataParallel looks after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpiddp.typing import Array

from .bucket import ParameterLike


def ignore(module: Any, names: Iterable[str]) -> None:
    """Leave the parameters and buffers with these names out of every later `Selection` of ``module``."""
    module._ddp_params_and_buffers_to_ignore = frozenset(names)


class Selection:
    """A module's parameters and buffers, but those to `ignore`; looked up each time, because they may be replaced.

    Parameters
    ----------
    module : Module
        Whose.
    ignored : iterable of str, optional
        Names of those to leave alone, in place of those named by `ignore`.
    """

    def __init__(self, module: Any, ignored: Iterable[str] | None = None) -> None:
        if ignored is None:
            ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._module, self._ignored = module, frozenset(ignored)

    def _parameter(self, name: str, parameter: Any) -> ParameterLike:
        found: ParameterLike = parameter
        return found

    def _buffer(self, buffer: Any) -> Array:
        found: Array = buffer
        return found

    def parameters(self) -> list[tuple[str, ParameterLike]]:
        """Return the parameters and their names."""
        named = self._module.named_parameters()
        return [(name, self._parameter(name, each)) for name, each in named if name not in self._ignored]

    def buffers(self) -> dict[str, Array]:
        """Return the buffers by their names."""
        return {name: self._buffer(each) for name, each in self._module.named_buffers() if name not in self._ignored}

    def arrays(self) -> list[Array]:
        """Return the arrays of the parameters, then the buffers."""
        return [parameter.data for _, parameter in self.parameters()] + list(self.buffers().values())
