"""Containers of modules, and the identity."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from .module import Module


class _Ordered(Module):
    def __getitem__(self, index: int) -> Any:
        return list(self.children())[index]

    def __setitem__(self, index: int, module: Module) -> None:
        setattr(self, self._names()[index], module)

    def __len__(self) -> int:
        return len(self._names())

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def _names(self) -> list[str]:
        return [name for name, kind in self._kinds.items() if kind == "module"]

    def append(self, module: Module) -> Any:
        """Append a module; return the container."""
        self.register_module(str(len(self)), module)
        return self


class Sequential(_Ordered):
    """A chain of modules, each called with the output of the module before.

    The modules are arguments in their order, or one ``OrderedDict`` of names and modules.
    """

    def __init__(self, *modules: Any) -> None:
        named = len(modules) == 1 and isinstance(modules[0], OrderedDict)
        given = modules[0] if named else {str(i): module for i, module in enumerate(modules)}
        for name, module in given.items():
            self.register_module(name, module)

    def forward(self, input: Any) -> Any:
        for module in self:
            input = module(input)
        return input


class ModuleList(_Ordered):
    """A list of modules that are registered as children."""

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        self.extend(modules or ())

    def extend(self, modules: Iterable[Module]) -> "ModuleList":
        """Append modules; return the list."""
        for module in modules:
            self.append(module)
        return self


class Identity(Module):
    """A module that returns its input. The constructor accepts any arguments and ignores them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Any) -> Any:
        return input
