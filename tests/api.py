"""The public API as text: one line for each module, class, function and public attribute.

``python -m tests.api`` prints it, ``python -m tests.api --write`` renews ``tests/api.txt``, which ``test_api.py``
compares with it. Annotations are left out: they may become more precise without a caller noticing. ``--pages FOLDER``
writes the docstrings as HTML pages with pdoc; whatever pdoc warns of is an error.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import os
import re
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(__file__).with_name("api.txt")

# Last, the top level: a name that it only repeats is an alias there.
ROOTS = tuple(
    "mpiddp" + part
    for part in (
        *(".distributed", ".autograd", ".nn.functional", ".nn.init", ".nn.utils", ".nn", ".optim.lr_scheduler"),
        *(".optim", ".parallel", ".data", ".elastic", ""),
    )
)

NAMED = ("device.array_namespace", "device.device_count", "device.upload", "settings.outside_of_jobs")
"""Names that the documents mention, of modules that are internal otherwise."""


OF_TORCH = "module mpiddp.torch"
"""Here begins the last part, which needs torch."""


def dump(*roots: str) -> str:
    """Return the public API of some modules, sorted within each one, ending in a newline."""
    modules = [importlib.import_module(root) for root in roots]
    homes: dict[object, str] = {}
    for module in modules:
        for name in sorted(public_names(module)):
            found = getattr(module, name)
            if isinstance(found, type | types.FunctionType):
                homes.setdefault(found, f"{module.__name__}.{name}")
    return "".join(f"{line}\n" for module in modules for line in _module(module, homes))


def dump_without_torch() -> str:
    lines = []
    for name in NAMED:
        module_name, _, function = f"mpiddp.{name}".rpartition(".")
        lines.append(f"mpiddp.{name}{_signature(getattr(importlib.import_module(module_name), function))}\n")
    return dump(*ROOTS) + "".join(lines)


def _module(module: types.ModuleType, homes: dict[object, str]) -> Iterator[str]:
    yield f"module {module.__name__}"
    for name in sorted(public_names(module)):
        found, full = getattr(module, name), f"{module.__name__}.{name}"
        if isinstance(found, types.ModuleType):
            yield f"{full} is a module"
        elif not isinstance(found, type | types.FunctionType):
            yield f"{full} = {_value(found)}"
        elif homes[found] != full:
            yield f"{full} is {homes[found]}"
        elif isinstance(found, type):
            yield from _class(found, full, homes)
        else:
            yield f"{full}{_signature(found)}"


def public_names(module: types.ModuleType) -> list[str]:
    if module.__name__ == "mpiddp":
        return dir(module)
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = module.__name__
    return [name for name, found in vars(module).items() if name[0] != "_" and getattr(found, "__module__", "") == own]


def _class(cls: type, full: str, homes: dict[object, str]) -> Iterator[str]:
    # The constructor of an enumeration differs between Python's versions.
    yield f"class {full}" if issubclass(cls, enum.Enum) else f"class {full}{_signature(cls)}"
    bases = [homes.get(base) or base.__name__ for base in cls.__mro__[1:-1] if base in homes or _is_builtin(base)]
    if bases:
        yield f"{full} is also {', '.join(bases)}"
    # A caller sees no difference between a method of the class and one of a base that is not public.
    listed = {part for base in cls.__mro__[1:] if base in homes for part in base.__mro__}
    own = [base for base in reversed(cls.__mro__) if base.__module__.startswith("mpiddp") and base not in listed]
    found = {name: value for base in own for name, value in (inspect.get_annotations(base) | vars(base)).items()}
    for name, value in sorted((item for item in found.items() if item[0][0] != "_"), key=lambda item: item[0]):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        isfunction = isinstance(function, types.FunctionType)
        yield f"{full}.{name}{_signature(function) if isfunction else ' is an attribute'}"


def _is_builtin(base: type) -> bool:
    return base.__module__ == "builtins"


def _signature(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except ValueError:  # inherited from C
        return "(...)"
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    parameters = [
        each if each.default is each.empty else each.replace(default=_Text(_value(each.default))) for each in parameters
    ]
    return str(inspect.Signature(parameters))


class _Text(str):
    """Stands in a signature as it is, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _value(value: object) -> str:
    """Return a literal's text, else what it is: a repr may hold an address or change with Python."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, bool | int | float | str | bytes | tuple | list | None):
        return repr(value)
    if isinstance(value, type | types.FunctionType):
        return value.__qualname__
    constant = next((name for name, found in vars(type(value)).items() if found is value), None)
    return f"{type(value).__qualname__}.{constant}" if constant else f"<{type(value).__qualname__}>"


def write_pages(folder: Path) -> None:
    """Write a page for each public module."""
    import pdoc
    import pdoc.render

    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("error")
    for module in map(importlib.import_module, ROOTS):
        # pdoc looks into a module's dictionary, and many names here are loaded on first use.
        module.__all__ = public_names(module)
        vars(module).update({name: getattr(module, name) for name in module.__all__})
    pdoc.render.configure(docformat="numpy")
    os.chdir(folder)  # else pdoc warns of a folder mpiddp here that is not the installed one
    pdoc.pdoc("mpiddp", f"!(?!({'|'.join(map(re.escape, ROOTS))})$)", output_directory=Path())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.api", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"renew tests/{FILE.name}")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="write HTML pages into this folder instead")
    arguments = parser.parse_args()
    if arguments.pages is not None:
        write_pages(arguments.pages)
    elif arguments.write:
        FILE.write_text(dump_without_torch() + dump("mpiddp.torch"))
    else:
        print(dump_without_torch() + dump("mpiddp.torch"), end="")


if __name__ == "__main__":
    main()
