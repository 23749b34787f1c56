# SPDX-License-Identifier: Apache-2.0
"""Attention for JAX: a function like jax.nn.dot_product_attention, differentiable, under jit, grad, vmap and over several devices.

    from flashattn.jax import dot_product_attention
    out = dot_product_attention(query, key, value, is_causal=True)      # (batch, rows, heads, head_dim)

XLA calls the library where the extension is there (`python3 -m flashattn.build_jax`), on the CPU and on CUDA; `extension` says whether it is, and
`extension.reason` why not. Without it JAX hands host arrays to the library, so that arrays of an accelerator travel to the host and back.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Optional, Tuple, Union

import jax
import jax.numpy as jnp
import numpy

from ._jax_call import Numbers, call, extension

__all__ = ["dot_product_attention", "extension"]

Names = Tuple[str, ...]  # of tensors besides q, k and v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(numbers: Numbers, names: Names, *tensors: Any) -> Tuple[Any, Any]:
    out, lse = call(("q", "k", "v", *names), numbers, tensors)
    return out, lse


def _attention_forward(numbers: Numbers, names: Names, *tensors: Any) -> Any:
    out, lse = _attention(numbers, names, *tensors)
    return (out, lse), (out, lse, tensors)


def _attention_backward(numbers: Numbers, names: Names, saved: Any, gradient: Any) -> Any:
    out, lse, tensors = saved
    inputs = ("dout", "dlse", "q", "k", "v", "out", "lse", *names)
    gradients = call(inputs, numbers, (*gradient, *tensors[:3], out, lse, *tensors[3:]))
    of_names = dict(zip([name for name in ("q", "k", "v", "bias", "sink") if name in inputs], gradients))
    # Masks and lengths have none: JAX wants zeros of a type without values for them.
    none = (numpy.zeros(x.shape, jax.dtypes.float0) for x in tensors)
    return tuple(of_names.get(name, zero) for name, zero in zip(("q", "k", "v", *names), none))


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
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Optional[Union[int, Tuple[int, int]]] = None,
    return_residual: bool = False,
    softcap: float = 0.0,
    sink: Any = None,
    deterministic: bool = False,
) -> Any:
    """jax.nn.dot_product_attention on (batch, rows, heads, head_dim) or (rows, heads, head_dim), and softcap and sink beside.

    bias is added to the logits, mask is True where a query sees a key; both are (batch or 1, heads or 1, rows of query or 1, rows of key).
    Lengths are (batch), int32. Unlike there a row that sees no key, or past its length, gives 0. return_residual=True returns (out, lse) with
    lse as (batch, heads, rows). deterministic=True: gradients have the same bits in every run; on the CPU they always do.
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
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            return_residual=True,
            softcap=softcap,
            sink=sink,
            deterministic=deterministic,
        )
        out, lse = (x[0] for x in result)
        return (out, lse) if return_residual else out
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    numbers: Dict[str, Any] = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    numbers["causal"] = "top_left" if is_causal else False
    if local_window_size is not None:
        # JAX counts positions from the first row and the first key; with as many of one as of the other that is the library's way.
        has_lengths = query_seq_lengths is not None or key_value_seq_lengths is not None
        if not is_causal and (has_lengths or query.shape[1] != key.shape[1]):
            raise ValueError("local_window_size needs as many rows of query as of key, and no lengths, or is_causal=True")
        numbers["window"] = local_window_size
    given = {
        "bias": bias,
        "element_mask": None if mask is None else jnp.asarray(mask, bool),
        "sink": sink,
        "seqused_q": query_seq_lengths,
        "seqused_k": key_value_seq_lengths,
    }
    tensors = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    out, lse = _attention(tuple(numbers.items()), tuple(tensors), query, key, value, *tensors.values())
    return (out, lse) if return_residual else out
