"""The base of layers and models."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.autograd.function import values_of
from mpiddp.device import placed
from mpiddp.device.half import is_floating
from mpiddp.device.place import conversion
from mpiddp.typing import Array

from .parameter import Parameter

_BUFFERS = ("buffer", "unsaved buffer")


class IncompatibleKeys(NamedTuple):
    """The result of `Module.load_state_dict`: keys that the given state lacks, and keys that the module lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Module:
    """A part of a model, as ``torch.nn.Module``; buffers are arrays.

    A subclass assigns parameters and modules to attributes, and defines ``forward``. Unlike torch's it need not call
    ``super().__init__()``, for there is nothing to prepare. ``state_dict`` holds the arrays of the module themselves,
    which go on changing in training; ``copy.deepcopy`` of it keeps their present values. ``load_state_dict`` writes
    into these arrays.

    Examples
    --------
    >>> from mpiddp import nn
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 2)
    ...
    ...     def forward(self, x):
    ...         return self.layer(x).tanh()
    >>> [name for name, _ in Net().named_parameters()]
    ['layer.weight', 'layer.bias']
    """

    training: bool = True
    """True in training, in which dropout is active and batch normalization uses the batch's statistics."""

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """The attributes that are parameters, buffers and modules, in the order of their registration.

        A change makes a new table. So a loop over the parameters may register buffers, and ``copy.copy`` may share it.
        """
        return {}

    def __init__(self) -> None:
        pass  # as in torch, a base class behind this one is not called, for it may need arguments

    if TYPE_CHECKING:  # attributes that are registered by their names have the type Any

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output; subclasses define it."""
        raise NotImplementedError(f'Module [{type(self).__name__}] is missing the required "forward" function')

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``."""
        return self.forward(*args, **kwargs)

    # -- attributes ------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self._kinds.get(name)
        if isinstance(value, Parameter):
            self._register("parameter", name, value)
        elif isinstance(value, Module):
            self._register("module", name, value)
        elif kind in _BUFFERS:
            vars(self)[name] = _as_buffer(name, value)
        elif kind is not None and value is not None:
            what, wanted = ("parameter", "Parameter") if kind == "parameter" else ("child module", "Module")
            raise TypeError(
                f"cannot assign '{type(value).__name__}' as {what} '{name}' (mpiddp.nn.{wanted} or None expected)"
            )
        else:
            super().__setattr__(name, value)

    def _register(self, kind: str, name: str, value: Any) -> None:
        """Set an attribute of a kind.

        It keeps the position of an older one of that name, because an optimizer's state numbers parameters in order.
        """
        if self._kinds.get(name) != kind:
            others = {other: kept for other, kept in self._kinds.items() if other != name}
            vars(self)["_kinds"] = others | {name: kind}
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        vars(self)["_kinds"] = {other: kept for other, kept in self._kinds.items() if other != name}

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Add a parameter under ``name``; None reserves the name."""
        self._register_new("parameter", name, param)

    def register_buffer(self, name: str, tensor: Array | Tensor | None, persistent: bool = True) -> None:
        """Add an array that is not trained, without a copy. If ``persistent``, the array is part of `state_dict`."""
        self._register_new("buffer" if persistent else "unsaved buffer", name, _as_buffer(name, tensor))

    def register_module(self, name: str, module: Module | None) -> None:
        """Add a module under ``name``, as assignment does."""
        self._register_new("module", name, module)

    add_module = register_module

    def _register_new(self, kind: str, name: str, value: Any) -> None:
        if "." in name:
            raise KeyError(f'{kind} name can\'t contain ".", got: {name}')
        if name == "":
            raise KeyError(f'{kind} name can\'t be empty string ""')
        if hasattr(self, name) and name not in self._kinds:
            raise KeyError(f"attribute '{name}' already exists")
        self._register(kind, name, value)

    def _own(self, *kinds: str) -> list[tuple[str, Any]]:
        """Return the attributes of some kinds that are not None, with their names."""
        found = vars(self)
        return [(name, found[name]) for name, kind in self._kinds.items() if kind in kinds and found[name] is not None]

    # -- walking ---------------------------------------------------------------------------------------------------

    def named_modules(self, *, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and all below it with their dotted names, each once."""
        yield from self._walk(prefix, set())

    def _walk(self, prefix: str, seen: set[Module]) -> Iterator[tuple[str, Module]]:
        if self in seen:
            return
        seen.add(self)
        yield prefix, self
        for name, kind in self._kinds.items():
            if kind == "module" and (module := vars(self)[name]) is not None:
                yield from module._walk(f"{prefix}.{name}" if prefix else name, seen)

    def modules(self) -> Iterator[Module]:
        """Yield this module and all below it, each once."""
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules directly below this one with their names."""
        return iter(self._own("module"))

    def children(self) -> Iterator[Module]:
        """Yield the modules directly below this one."""
        return (module for _, module in self.named_children())

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters with their dotted names, each once, in the order of registration."""
        return self._named(("parameter",), prefix, recurse)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield the parameters as :meth:`named_parameters`."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Array]]:
        """Yield the buffers with their dotted names, each once."""
        return self._named(_BUFFERS, prefix, recurse)

    def buffers(self, recurse: bool = True) -> Iterator[Array]:
        """Yield the buffers, each once."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named(self, kinds: tuple[str, ...], prefix: str, recurse: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        modules = self.named_modules(prefix=prefix) if recurse else iter(((prefix, self),))
        for module_name, module in modules:
            for name, kind in module._kinds.items():
                if kind in kinds and (value := vars(module)[name]) is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{module_name}.{name}" if module_name else name), value

    # -- modes and gradients ---------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set this module and all below it to training, or to evaluation."""
        self.training = mode
        for module in self.children():  # by the method of each child, which may be overridden
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set this module and all below it to evaluation."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or with ``set_to_none=False`` fill them with zeros."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad[...] = 0

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let gradients flow to all parameters, or to none."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def convert(self, fn: Callable[[Array], Array]) -> Self:
        """Replace the array of every parameter and buffer by ``fn(array)``.

        A parameter that gets another array loses its gradient and ``grad_slot``.
        """
        for parameter in self.parameters():
            converted = fn(parameter.data)
            if converted is not parameter.data:
                parameter.data = converted
                parameter.grad = parameter.grad_slot = None
        for module in self.modules():
            for name, buffer in module._own(*_BUFFERS):
                vars(module)[name] = fn(buffer)
        return self

    def to(self, device: Any = None, dtype: Any = None, non_blocking: bool = False) -> Self:
        """Move all parameters and buffers to a device, cast floats to a dtype, or both, in place.

        ``device`` is ``"cpu"``, ``"cuda"`` (the current GPU), ``"cuda:N"``, N, a floating dtype, or an array or tensor
        whose device and dtype are taken. An optimizer of the parameters stays valid. A parameter that gets another
        array loses its gradient. Move a model before DistributedDataParallel wraps it.
        """
        convert = conversion(device.data if isinstance(device, Tensor) else device, dtype)
        if convert.dtype is not None and not is_floating(convert.dtype):
            raise TypeError(f"Module.to() takes a device or a floating dtype, got {convert.dtype}")
        others = convert._replace(dtype=None)
        return self.convert(lambda array: (convert if is_floating(array.dtype) else others)(array))

    def cpu(self) -> Self:
        """Move all parameters and buffers to the host."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """Move all parameters and buffers to a GPU, by default the current one."""
        return self.to("cuda" if device is None else device)

    def apply(self, fn: Callable[[Module], object]) -> Self:
        """Call ``fn`` with every module below this one, then with this one."""
        for module in self.children():
            module.apply(fn)
        fn(self)
        return self

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, *, prefix: str = "") -> OrderedDict[str, Array]:
        """Return the arrays of parameters and persistent buffers, not copied, by dotted name.

        An array that several names share is in the result under each of them.
        """
        state: OrderedDict[str, Array] = OrderedDict()
        for name, parameter in self._own("parameter"):
            state[prefix + name] = parameter.data
        for name, buffer in self._own("buffer"):
            state[prefix + name] = buffer
        for name, module in self._own("module"):
            state.update(module.state_dict(prefix=f"{prefix}{name}."))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Copy arrays into the arrays of this module, cast to its dtypes.

        If keys or shapes differ, RuntimeError is raised before anything is copied. Missing and unexpected keys are
        errors only if ``strict``; otherwise the result names them as ``missing_keys`` and ``unexpected_keys``.
        """
        own = self.state_dict()
        result = IncompatibleKeys(
            [key for key in own if key not in state_dict], [key for key in state_dict if key not in own]
        )
        errors = []
        if strict and result.unexpected_keys:
            errors.append(f"Unexpected key(s) in state_dict: {_quoted(result.unexpected_keys)}. ")
        if strict and result.missing_keys:
            errors.append(f"Missing key(s) in state_dict: {_quoted(result.missing_keys)}. ")
        found = {key: values_of(state_dict[key]) for key in own if key in state_dict}
        for key, value in found.items():
            if np.shape(value) != own[key].shape:
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {np.shape(value)} from checkpoint, the "
                    f"shape in current model is {own[key].shape}."
                )
        if errors:
            raise RuntimeError(f"Error(s) in loading state_dict for {type(self).__name__}:\n\t" + "\n\t".join(errors))
        for key, value in found.items():
            own[key][...] = placed(value, own[key])
        return result

    # -- representation --------------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """Return the options that ``repr`` shows."""
        return ""

    def __repr__(self) -> str:
        extra = self.extra_repr()
        children = [f"({name}): " + repr(module).replace("\n", "\n  ") for name, module in self.named_children()]
        if not children:
            return f"{type(self).__name__}({extra})"
        lines = ([extra] if extra else []) + children
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"


class Layer(Module):
    """Base of the layers. Its ``repr`` shows the options, and parameters that the layer lacks, as in ``bias=None``."""

    def extra_repr(self) -> str:
        options: dict[str, Any] = {name: x for name, x in vars(self).items() if isinstance(x, int | float | tuple)}
        options |= {key: None for key, kind in self._kinds.items() if kind == "parameter" and vars(self)[key] is None}
        return ", ".join(f"{name}={x}" for name, x in options.items() if name != "training")


def _quoted(keys: Sequence[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def _as_buffer(name: str, value: Any) -> Array | None:
    if isinstance(value, Tensor):
        return value.data
    if value is not None and not hasattr(value, "dtype"):
        raise TypeError(f"cannot assign '{type(value).__name__}' object to buffer '{name}' (array or None required)")
    return value  # type: ignore[no-any-return]
