"""The parameter: a tensor that a module owns and an optimizer changes."""

from __future__ import annotations

from typing import Any

from mpiddp.autograd import Tensor


class Parameter(Tensor):
    """A leaf tensor that a module registers when it is assigned to an attribute.

    Parameters
    ----------
    data : array_like
        Initial values; kept, not copied.
    requires_grad : bool, default True
        Train it.
    """

    def __init__(self, data: Any, requires_grad: bool = True) -> None:
        super().__init__(data, requires_grad)
