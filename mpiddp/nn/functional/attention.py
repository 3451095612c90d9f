"""Attention: a mean of values, weighted by how well keys fit a query. Imports ``autograd`` and ``nn.random``."""
# ruff: noqa: D102 (forward and backward are Function's)
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.function import unbroadcast
from mpiddp.autograd.half import widened
from mpiddp.device import array_namespace
from mpiddp.typing import Array

from ..random import keep_mask


class Attention(Function):
    """``softmax(q k' scale + bias) v`` for q (..., L, E), k (..., S, E), v (..., S, V); scores are kept for backward.

    ``bias`` broadcasts to (..., L, S) and may hold minus infinity; a row of nothing else gives zeros.
    """

    def forward(self, q: Array, k: Array, v: Array, bias: Array | None, scale: float, dropout_p: float) -> Array:
        xp = array_namespace(q)
        self.q, self.k, self.v, self.scale = q, k, v, scale
        self.dtype = q.dtype
        scores = xp.matmul(widened(q), widened(k).swapaxes(-1, -2))  # (..., L, S)
        scores *= scores.dtype.type(scale)
        if bias is not None:
            scores = scores + bias
        largest = scores.max(axis=-1, keepdims=True)
        scores -= xp.where(xp.isfinite(largest), largest, scores.dtype.type(0))
        xp.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        scores /= xp.where(total > 0, total, scores.dtype.type(1))
        self.weights = scores
        self.mask = keep_mask(scores, dropout_p) if dropout_p else None
        kept = scores if self.mask is None else scores * self.mask
        return xp.matmul(kept, widened(v)).astype(self.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        xp, weights, mask = array_namespace(grad), self.weights, self.mask
        grad, q, k, v = (widened(x) for x in (grad, self.q, self.k, self.v))
        for_q = for_k = for_v = None
        if self.needs(2):
            kept = weights if mask is None else weights * mask
            for_v = unbroadcast(xp.matmul(kept.swapaxes(-1, -2), grad), v.shape)
        for_scores = xp.matmul(grad, v.swapaxes(-1, -2))
        if mask is not None:
            for_scores *= mask
        for_scores *= weights
        for_scores -= weights * for_scores.sum(axis=-1, keepdims=True)
        for_scores *= for_scores.dtype.type(self.scale)
        if self.needs(0):
            for_q = unbroadcast(xp.matmul(for_scores, k), q.shape)
        if self.needs(1):
            for_k = unbroadcast(xp.matmul(for_scores.swapaxes(-1, -2), q), k.shape)
        return tuple(None if x is None else x.astype(self.dtype, copy=False) for x in (for_q, for_k, for_v))


def causal_mask(length: int, source: int) -> Array:
    """Return booleans (length, source): whether a position sees another, which it does if that is not after it."""
    return np.tril(np.ones((length, source), dtype=bool))


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return, for each query, the mean of the values weighted by the softmax of its products with the keys.

    Parameters
    ----------
    query : array or Tensor
        Shape (..., L, E).
    key : array or Tensor
        Shape (..., S, E).
    value : array or Tensor
        Shape (..., S, V).
    attn_mask : array, optional
        Broadcasts to (..., L, S): booleans, True where a query sees a key; or numbers, added to the products. Gets no
        gradient.
    dropout_p : float, default 0
        Probability with which a weight is left out; in evaluation too.
    is_causal : bool, default False
        A query sees the keys up to its own position only.
    scale : float, optional
        Factor of the products; 1 / sqrt(E).

    Returns
    -------
    Tensor
        Shape (..., L, V). A query that sees no key gets zeros.

    Raises
    ------
    RuntimeError
        If ``attn_mask`` and ``is_causal`` are given, as in torch.
    ValueError
        If shapes do not fit.

    Notes
    -----
    Keeps the weights, L S numbers for each head, for backward. Half precision is computed in float32 and rounded once.

    References
    ----------
    A. Vaswani et al., Attention is all you need, NeurIPS 2017. ``torch.nn.functional.scaled_dot_product_attention``.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            "attention needs query (..., L, E), key (..., S, E) and value (..., S, V), got shapes"
            f" {query.shape}, {key.shape}, {value.shape}"
        )
    mask = attn_mask.data if isinstance(attn_mask, Tensor) else attn_mask
    if is_causal:
        mask = causal_mask(query.shape[-2], key.shape[-2])
    array = query.data if isinstance(query, Tensor) else query
    if mask is not None and mask.dtype == bool:
        xp = array_namespace(array)
        mask = xp.where(xp.asarray(mask), widened(array).dtype.type(0), widened(array).dtype.type(-np.inf))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Attention.apply(query, key, value, mask, factor, dropout_p)
