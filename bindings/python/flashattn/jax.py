# SPDX-License-Identifier: Apache-2.0
"""Attention for JAX on the CPU: a function like jax.nn.dot_product_attention, differentiable, under jit, grad and vmap.

    from flashattn.jax import dot_product_attention
    out = dot_product_attention(query, key, value, is_causal=True)      # (batch, rows, heads, head_dim)

JAX hands host arrays to the library (jax.pure_callback), so arrays of an accelerator travel to the host and back.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Optional, Tuple, Union

import jax
import jax.numpy as jnp
import numpy

import flashattn

__all__ = ["dot_product_attention"]

Settings = Tuple[Tuple[str, Any], ...]  # options of flashattn.forward, hashable


def _tensors(bias: Any, sink: Any) -> Dict[str, Any]:
    return {name: numpy.asarray(x) for name, x in (("bias", bias), ("sink", sink)) if x is not None}


def _call_forward(settings: Settings, q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Tuple[Any, Any]:
    return flashattn.forward(numpy.asarray(q), numpy.asarray(k), numpy.asarray(v), **_tensors(bias, sink), **dict(settings))


def _call_backward(
    settings: Settings, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, sink: Any
) -> Any:
    dout, dlse, q, k, v, out, lse = (numpy.asarray(x) for x in (dout, dlse, q, k, v, out, lse))
    return tuple(flashattn.backward(dout, q, k, v, out, lse, dlse=dlse, **_tensors(bias, sink), **dict(settings)))


def _shape(like: Any) -> Any:
    return None if like is None else jax.ShapeDtypeStruct(like.shape, like.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: Settings, q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Tuple[Any, Any]:
    batch, rows, heads, _ = q.shape
    shapes = (
        jax.ShapeDtypeStruct((batch, rows, heads, v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32),
    )
    call = functools.partial(_call_forward, settings)
    return jax.pure_callback(call, shapes, q, k, v, bias, sink, vmap_method="sequential")


def _attention_forward(settings: Settings, q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
    out, lse = _attention(settings, q, k, v, bias, sink)
    return (out, lse), (q, k, v, out, lse, bias, sink)


def _attention_backward(settings: Settings, saved: Any, gradient: Any) -> Any:
    q, k, v, out, lse, bias, sink = saved
    shapes = tuple(_shape(x) for x in (q, k, v, bias, sink))
    call = functools.partial(_call_backward, settings)
    return jax.pure_callback(call, shapes, *gradient, q, k, v, out, lse, bias, sink, vmap_method="sequential")


_attention.defvjp(_attention_forward, _attention_backward)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Optional[float] = None,
    is_causal: bool = False,
    local_window_size: Optional[Union[int, Tuple[int, int]]] = None,
    return_residual: bool = False,
    softcap: float = 0.0,
    sink: Any = None,
) -> Any:
    """jax.nn.dot_product_attention on (batch, rows, heads, head_dim) or (rows, heads, head_dim), and softcap and sink beside.

    bias is added to the logits, mask is True where a query sees a key; both are (batch or 1, heads or 1, rows of query or 1, rows of key).
    Unlike there a row that sees no key gives 0. return_residual=True returns (out, lse) with lse as (batch, heads, rows).
    """
    if query.ndim == 3:
        result = dot_product_attention(
            query[None],
            key[None],
            value[None],
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            local_window_size=local_window_size,
            return_residual=True,
            softcap=softcap,
            sink=sink,
        )
        out, lse = (x[0] for x in result)
        return (out, lse) if return_residual else out
    if mask is not None:
        hidden = jnp.where(mask, 0, -jnp.inf).astype(query.dtype)
        bias = hidden if bias is None else bias + hidden
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    settings: Dict[str, Any] = {"scale": scale, "softcap": softcap, "causal": "top_left" if is_causal else False}
    if local_window_size is not None:
        # JAX counts positions from the first row and the first key; with as many of one as of the other that is the library's way.
        if query.shape[1] != key.shape[1] and not is_causal:
            raise ValueError("local_window_size needs as many rows of query as of key, or is_causal=True")
        settings["window"] = local_window_size
    out, lse = _attention(tuple(settings.items()), query, key, value, bias, sink)
    return (out, lse) if return_residual else out
