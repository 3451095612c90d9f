"""``Parameter``, the tensors of a module that are trained."""

from typing import Any

from mpiddp.autograd import Tensor


class Parameter(Tensor):
    """A leaf tensor that a module registers when it is assigned to an attribute. ``data`` is kept, not copied."""

    def __init__(self, data: Any, requires_grad: bool = True) -> None:
        super().__init__(data, requires_grad)
