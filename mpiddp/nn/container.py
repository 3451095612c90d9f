"""Containers of modules, and the identity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .module import Module


class _Ordered(Module):
    def __getitem__(self, index: Any) -> Any:
        modules = list(self.children())
        return type(self)._of(modules[index]) if isinstance(index, slice) else modules[index]

    @classmethod
    def _of(cls, modules: list[Module]) -> Any:
        raise NotImplementedError

    def __setitem__(self, index: int, module: Module) -> None:
        setattr(self, list(self._modules)[index], module)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def append(self, module: Module) -> Any:
        """Append a module; return the container."""
        self.register_module(str(len(self)), module)
        return self


class Sequential(_Ordered):
    """Modules called one after the other; given in order, or as one ``OrderedDict`` of names and modules."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], OrderedDict):
            named = list(modules[0].items())
        else:
            named = [(str(i), module) for i, module in enumerate(modules)]
        for name, module in named:
            self.register_module(name, module)

    @classmethod
    def _of(cls, modules: list[Module]) -> Sequential:
        return cls(*modules)

    def forward(self, input: Any) -> Any:
        for module in self:
            input = module(input)
        return input


class ModuleList(_Ordered):
    """A list of modules that are registered as children."""

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        super().__init__()
        self.extend(modules or ())

    @classmethod
    def _of(cls, modules: list[Module]) -> ModuleList:
        return cls(modules)

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        """Append modules; return the list."""
        for module in modules:
            self.append(module)
        return self


class ModuleDict(Module):
    """A dict of modules that are registered as children."""

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] | None = None) -> None:
        super().__init__()
        self.update(modules or ())

    def __getitem__(self, key: str) -> Any:
        return self._modules[key]

    def __setitem__(self, key: str, module: Module) -> None:
        self.register_module(key, module)

    def __delitem__(self, key: str) -> None:
        del self._modules[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, key: object) -> bool:
        return key in self._modules

    def keys(self) -> Iterable[str]:
        """Return the names."""
        return self._modules.keys()

    def values(self) -> Iterable[Any]:
        """Return the modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return names and modules."""
        return self._modules.items()

    def pop(self, key: str) -> Any:
        """Remove and return a module."""
        return self._modules.pop(key)

    def clear(self) -> None:
        """Remove all modules."""
        self._modules.clear()

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Add modules, in place of those of the same names."""
        for key, module in dict(modules).items():
            self[key] = module


class Identity(Module):
    """Returns its input; ignores its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Any) -> Any:
        return input
