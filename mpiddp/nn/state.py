"""Loading a module's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import placed
from mpiddp.typing import Array


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` has found: keys that the state lacks, and keys that the module lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(state_dict: Mapping[str, Any], own: Mapping[str, Array], strict: bool, owner: str) -> IncompatibleKeys:
    """Copy arrays to ``own``, as :meth:`mpiddp.nn.Module.load_state_dict`; errors name the class ``owner``."""
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
