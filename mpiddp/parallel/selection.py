"""The selection: the parameters and buffers of a module that DistributedDataParallel looks after."""

from __future__ import annotations

from collections.abc import Iterable

from mpiddp.nn import Module, Parameter
from mpiddp.typing import Array


def ignore(module: Module, names: Iterable[str]) -> None:
    """Leave the parameters and buffers with these names out of every later `Selection` of ``module``."""
    module._ddp_params_and_buffers_to_ignore = frozenset(names)


class Selection:
    """A module's parameters and buffers, but those to `ignore`; looked up each time, because they may be replaced.

    Parameters
    ----------
    module : Module
        Whose.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))

    def parameters(self) -> list[tuple[str, Parameter]]:
        """Return the parameters and their names."""
        return [(name, each) for name, each in self._module.named_parameters() if name not in self._ignored]

    def buffers(self) -> dict[str, Array]:
        """Return the buffers by their names."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def arrays(self) -> list[Array]:
        """Return the arrays of the parameters, then the buffers."""
        return [parameter.data for _, parameter in self.parameters()] + list(self.buffers().values())
