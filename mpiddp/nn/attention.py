"""Attention: function and layer."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor
from mpiddp.autograd.function import unbroadcast
from mpiddp.device import array_namespace
from mpiddp.device.half import widened
from mpiddp.typing import Array, DTypeLike

from . import init
from .activation import softmax
from .dropout import dropout
from .linear import Linear, linear
from .module import Module
from .parameter import Parameter
from .random import keep_mask


class AttentionFunction(Function):
    """``softmax(q k' scale + bias) v`` for q (..., L, E), k (..., S, E), v (..., S, V).

    ``bias`` broadcasts to (..., L, S); a row of minus infinity gives zeros.
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
    """Return booleans (length, source): True up to the position itself."""
    return np.tril(np.ones((length, source), dtype=bool))


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return the means of ``value`` (..., S, V), weighted by the softmax of the queries' products with the keys.

    After A. Vaswani et al., arXiv:1706.03762; keeps L S weights for each head. ``query`` is (..., L, E), ``key`` (...,
    S, E); a query that sees no key gets zeros.

    Parameters
    ----------
    attn_mask : array, optional
        Broadcasts to (..., L, S): booleans, True where a query sees a key, or numbers to add. Gets no gradient.
    dropout_p : float
        Probability of dropping a weight, in evaluation too.
    is_causal : bool
        A query sees the keys up to its own position; excludes ``attn_mask``.
    scale : float, optional
        Factor of the products; 1 / sqrt(E).
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
    return AttentionFunction.apply(query, key, value, mask, factor, dropout_p)


class MultiheadAttention(Module):
    """Attention in several subspaces, as ``torch.nn.MultiheadAttention``.

    Vectors have length ``embed_dim`` E, which ``num_heads`` H divides; shapes are (L, N, E), or (N, L, E) with
    ``batch_first``. Weights are dropped with probability ``dropout`` in training.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.in_proj_weight = Parameter(np.empty((3 * embed_dim, embed_dim), dtype))
        self.register_parameter("in_proj_bias", Parameter(np.empty(3 * embed_dim, dtype)) if bias else None)
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        init.xavier_uniform_(self.in_proj_weight)
        for vector in (self.in_proj_bias, self.out_proj.bias):
            if vector is not None:
                init.zeros_(vector)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        need_weights: bool = True,
        attn_mask: Array | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, of the shape of ``query``, and the weights (N, L, S), or None.

        The weights are means over the heads; without ``need_weights`` they are not computed, which is faster. ``key``
        and ``value`` have S positions; if they are ``query`` itself, one product makes all projections. ``attn_mask``
        broadcasts to (N, H, L, S): booleans, of which True hides a key, or numbers to add to the scores. ``is_causal``
        hides later positions; unlike torch's, it needs no mask.
        """
        if not query.ndim == key.ndim == value.ndim == 3:
            expected = "(N, L, E)" if self.batch_first else "(L, N, E)"
            raise ValueError(
                f"attention needs query, key and value of three axes, {expected}"
                f" with a batch N that may be 1, got shapes {query.shape}, {key.shape} and {value.shape}"
            )
        q, k, v = (self._split(x) for x in self._projected(query, key, value))  # (N, H, L, E / H)
        p = self.dropout if self.training else 0.0
        mask = self._mask(q, k, attn_mask, is_causal)
        if not need_weights:
            return self.out_proj(self._join(scaled_dot_product_attention(q, k, v, mask, p))), None
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
        weights = dropout(softmax(scores if mask is None else scores + mask, -1), p, p > 0)
        return self.out_proj(self._join(weights @ v)), weights.mean(1)

    def _projected(self, query: Any, key: Any, value: Any) -> list[Tensor]:
        e, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        if query is key and key is value:
            joined = linear(query, weight, bias)
            return [joined[..., i * e : (i + 1) * e] for i in range(3)]
        rows = [slice(i * e, (i + 1) * e) for i in range(3)]
        return [
            linear(x, weight[part], None if bias is None else bias[part])
            for x, part in zip((query, key, value), rows, strict=True)
        ]

    def _mask(self, q: Tensor, k: Tensor, attn_mask: Array | None, is_causal: bool) -> Array | None:
        """Return what to add to the scores, or None."""
        xp = array_namespace(q.data)
        mask = attn_mask
        if mask is None and is_causal:
            mask = xp.asarray(~causal_mask(q.shape[2], k.shape[2]))
        if mask is not None and mask.dtype == bool:
            mask = xp.where(mask, -np.inf, 0.0)
        return None if mask is None else mask.astype(np.float32 if q.dtype.itemsize == 2 else q.dtype)

    def _split(self, x: Tensor) -> Tensor:
        heads = x.reshape(*x.shape[:2], self.num_heads, self.embed_dim // self.num_heads)
        return heads.permute(0, 2, 1, 3) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _join(self, heads: Tensor) -> Tensor:
        x = heads.permute(0, 2, 1, 3) if self.batch_first else heads.permute(2, 0, 1, 3)
        return x.reshape(*x.shape[:2], self.embed_dim)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
