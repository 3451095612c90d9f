"""Clipping of gradients."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpiddp import moved
from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> float | Array:
    """Scale gradients in place, so that their common norm is at most ``max_norm``, and return the norm before.

    Powers are summed in float64. With ``norm_type=math.inf`` the norm is the largest absolute value. On a GPU the
    result is an array without axes, so that the host need not wait for it.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddp import nn
    >>> p = nn.Parameter(np.zeros(2, np.float32))
    >>> p.grad = np.array([3, 4], np.float32)
    >>> nn.utils.clip_grad_norm_([p], max_norm=1.0)
    5.0
    >>> p.grad.round(3)
    array([0.6, 0.8], dtype=float32)
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    xp = array_namespace(gradients[0] if gradients else None)
    total: Any = _norm(xp.array([_norm(grad, norm_type) for grad in gradients]), norm_type)
    factor = xp.minimum(max_norm / (total + 1e-6), 1.0)  # if the norm is NaN, so is the factor, as in torch
    on_device = is_device_array(total)
    for grad in gradients if on_device or not factor >= 1 else ():  # reading it would wait for the GPU
        grad *= factor.astype(grad.dtype)
    return total if on_device else float(total)


def _norm(grad: Array, norm_type: float) -> Any:
    magnitudes = array_namespace(grad).abs(grad).astype(np.float64)
    if math.isinf(norm_type):
        return magnitudes.max() if grad.size else magnitudes.sum()
    return (magnitudes**norm_type).sum() ** (1 / norm_type)


moved.explain(__name__)
