"""A module's state: arrays by dotted names, and copying them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import placed
from mpiddp.typing import Array


class IncompatibleKeys:
    """Result of ``load_state_dict``: missing keys and unexpected ones."""

    def __init__(self, missing_keys: list[str], unexpected_keys: list[str]) -> None:
        self.missing_keys, self.unexpected_keys = missing_keys, unexpected_keys

    def __iter__(self) -> Iterator[list[str]]:
        return iter((self.missing_keys, self.unexpected_keys))

    def __repr__(self) -> str:
        if not self.missing_keys and not self.unexpected_keys:
            return "<All keys matched successfully>"
        return f"IncompatibleKeys(missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys})"


def load(state_dict: Mapping[str, Any], own: Mapping[str, Array], strict: bool, owner: str) -> IncompatibleKeys:
    """Copy the arrays of ``state_dict`` into those of ``own`` with the same names.

    Parameters
    ----------
    state_dict : mapping of str to array or Tensor
        Cast to the dtypes, and moved to the devices, of ``own``.
    own : mapping of str to array
        Written to.
    strict : bool
        Missing and unexpected keys are errors.
    owner : str
        Class of the module, for the error's text.

    Raises
    ------
    RuntimeError
        As :meth:`mpiddp.nn.Module.load_state_dict`.
    """
    result = IncompatibleKeys(
        [key for key in own if key not in state_dict], [key for key in state_dict if key not in own]
    )
    errors = []
    if strict and result.unexpected_keys:
        errors.append(f"Unexpected key(s) in state_dict: {_quoted(result.unexpected_keys)}. ")
    if strict and result.missing_keys:
        errors.append(f"Missing key(s) in state_dict: {_quoted(result.missing_keys)}. ")
    pairs = []
    for key, array in own.items():
        if key in state_dict:
            value = state_dict[key]
            value = value.data if isinstance(value, Tensor) else value
            pairs.append((array, value))
            if np.shape(value) != array.shape:
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {np.shape(value)} from checkpoint, the "
                    f"shape in current model is {array.shape}."
                )
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {owner}:\n\t" + "\n\t".join(errors))
    for array, value in pairs:
        array[...] = placed(value, array)
    return result


def _quoted(keys: Sequence[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)
