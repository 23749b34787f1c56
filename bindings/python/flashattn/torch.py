# SPDX-License-Identifier: Apache-2.0
"""Attention for PyTorch 2.4 and newer: differentiable, on CPU and CUDA tensors, whole under torch.compile and in CUDA graphs, under autocast
and the transforms of torch.func.

    from flashattn.torch import attention, scaled_dot_product_attention
    out = attention(q, k, v, causal=True)                                     # (batch, rows, heads, head_dim)
    out = scaled_dot_product_attention(query, key, value, is_causal=True)     # (batch, heads, rows, head_dim)

Derivatives are first ones, in reverse mode and, of q, k and v on the CPU and on Hopper GPUs, in forward mode (torch.func.jvp, dual numbers). Others
raise NotImplementedError; what fa_forward_jvp has no kernel for raises flashattn.Error.
"""

from typing import Any, Dict, Optional, Sequence, Union

import torch
from torch import Tensor

from ._torch_install import Installation, fallbacks, install, uninstall
from ._torch_ops import call

__all__ = ["Installation", "attention", "fallbacks", "install", "scaled_dot_product_attention", "uninstall"]

Integers = Union[Tensor, Sequence[Any], None]

_MASKS = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}
_CAST = (torch.float32, torch.float16, torch.bfloat16)  # what autocast turns into its dtype; 8-bit caches stay


def _autocast(tensors: Dict[str, Any]) -> None:
    """Casts queries, keys, values and bias as autocast casts the arguments of PyTorch's own attention."""
    dtype = torch.get_autocast_dtype(tensors["q"].device.type)
    for name in ("q", "k", "v", "bias"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype in _CAST:
            tensors[name] = tensor.to(dtype)


def _every_column(bias: Tensor, columns: int) -> Tensor:
    """A bias of one column for all keys; the library broadcasts the other dimensions by itself."""
    return bias if bias.shape[-1] == columns else bias.expand(*bias.shape[:-1], columns)


def _call(tensors: Dict[str, Any], numbers: Dict[str, Any]) -> Any:
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(tensors["q"].device.type):
        _autocast(tensors)
    if numbers.get("dropout_p", 0) > 0:
        tensors["dropout_seed"] = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=tensors["q"].device)
    if "deterministic" not in numbers and torch.are_deterministic_algorithms_enabled():
        numbers["deterministic"] = True
    return call(tensors, numbers)


_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def _int32(integers: Integers, device: torch.device, what: str) -> Optional[Tensor]:
    """Lengths, pages or slices as the int32 tensor on the device that the library reads, from a tensor of integers or a list."""
    if integers is None:
        return None
    if not isinstance(integers, Tensor):
        return torch.tensor(integers, dtype=torch.int32, device=device)
    if integers.dtype == torch.int32:
        return integers
    if integers.is_floating_point() or integers.is_complex() or integers.dtype == torch.bool:
        raise TypeError(f"{what} has dtype {integers.dtype}; it must hold integers")
    return integers.clamp(_INT32_MIN, _INT32_MAX).to(torch.int32) if integers.dtype == torch.int64 else integers.to(torch.int32)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: "bool | str" = False,
    window: "tuple[Optional[int], Optional[int]]" = (None, None),
    scale: Optional[float] = None,
    softcap: float = 0.0,
    bias: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    alibi_log_scale: float = 0.0,
    block_mask: Optional[Tensor] = None,
    block_counts: Integers = None,
    block_indices: Integers = None,
    block_size: "tuple[int, int]" = (0, 0),
    element_mask: Optional[Tensor] = None,
    slices: Integers = None,
    kv_indices: Integers = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Integers = None,
    cu_seqlens_k: Integers = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Integers = None,
    seqused_k: Integers = None,
    seqstart_k: Integers = None,
    page_table: Integers = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    num_splits: int = 0,
    deterministic: Optional[bool] = None,
    batch_invariant: bool = False,
    same_bits: bool = False,
    fp32_products: bool = False,
    return_lse: bool = False,
) -> "Tensor | tuple[Tensor, Tensor]":
    """softmax(scale q k^T + ..., masked) v of (batch, rows, heads, head_dim), or of packed (total, heads, head_dim) with `cu_seqlens`.

    Options mean what `flashattn.Options` says. Gradients flow to q, k, v, bias and sink, also through the lse that return_lse=True adds.
    Lengths, pages, slices and block lists may be lists or tensors of any integers; int32 on the device of q is read in place.
    Dropout draws its seed from PyTorch's generator of the device. deterministic=None follows torch.use_deterministic_algorithms().

    causal=True aligns the last query with the last *used* key: query i of s_q sees the keys j <= i + seqused_k - s_q. That is right where the
    queries are the newest tokens of a cache. Of a batch padded on the right, give `seqused_q` beside `seqused_k`, or causal="top_left":
    with `seqused_k` alone, queries of the shorter sequences see too few keys.
    """
    if causal not in _MASKS:
        raise ValueError(f"causal is {causal!r}; it must be one of {', '.join(map(repr, _MASKS))}")
    if scale == 0:
        raise ValueError("scale is 0; it must be positive, or None for 1 / sqrt(head_dim)")
    if bias is not None and bias.shape[-1] == 1 and cu_seqlens_k is None and page_table is None:
        bias = _every_column(bias, k.shape[-3])
    # Options are looked at in groups. A loop over all of them takes 1.5 us of a call that has none, and the operator 6.
    tensors: Dict[str, Any] = {"q": q, "k": k, "v": v}
    if not (bias is sink is alibi_slopes is block_mask is element_mask is q_descale is k_descale is v_descale is None):
        for name, tensor in (
            ("bias", bias),
            ("sink", sink),
            ("alibi_slopes", alibi_slopes),
            ("block_mask", block_mask),
            ("element_mask", element_mask),
            ("q_descale", q_descale),
            ("k_descale", k_descale),
            ("v_descale", v_descale),
        ):
            if tensor is not None:
                tensors[name] = tensor
    if not (
        block_counts is block_indices is slices is kv_indices is seqused_q is seqused_k is seqstart_k is page_table is None
    ):
        for name, integers in (
            ("block_counts", block_counts),
            ("block_indices", block_indices),
            ("slices", slices),
            ("kv_indices", kv_indices),
            ("seqused_q", seqused_q),
            ("seqused_k", seqused_k),
            ("seqstart_k", seqstart_k),
            ("page_table", page_table),
        ):
            if integers is not None:
                tensors[name] = _int32(integers, q.device, name)
    if not (cu_seqlens_q is cu_seqlens_k is None):
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if offsets is not None:  # int64 is read in place, too
                tensors[name] = offsets if isinstance(offsets, Tensor) else _int32(offsets, q.device, name)
    numbers: Dict[str, Any] = {}
    if causal:
        numbers["causal"] = _MASKS[causal]
    if scale is not None:
        numbers["scale"] = scale
    if (
        not (window[0] is window[1] is deterministic is None)
        or not (softcap == alibi_log_scale == dropout_p == block_size[0] == block_size[1] == 0)
        or not (max_seqlen_q == max_seqlen_k == num_splits == 0)
        or batch_invariant
        or same_bits
        or fp32_products
    ):
        for name, given, default in (
            ("window_left", window[0], None),
            ("window_right", window[1], None),
            ("softcap", softcap, 0),
            ("alibi_log_scale", alibi_log_scale, 0),
            ("dropout_p", dropout_p, 0),
            ("block_size_q", block_size[0], 0),
            ("block_size_k", block_size[1], 0),
            ("max_seqlen_q", max_seqlen_q, 0),
            ("max_seqlen_k", max_seqlen_k, 0),
            ("num_splits", num_splits, 0),
            ("deterministic", deterministic, None),
            ("batch_invariant", batch_invariant, False),
            ("same_bits", same_bits, False),
            ("fp32_products", fp32_products, False),
        ):
            if given is not default and given != default:
                numbers[name] = given
    out, lse = _call(tensors, numbers)
    return (out, lse) if return_lse else out


def _expand(tensor: Tensor, leading: Sequence[int]) -> Tensor:
    """Broadcasts the dimensions before the last two."""
    return tensor if tensor.shape[:-2] == tuple(leading) else tensor.expand(*leading, *tensor.shape[-2:])


def _broadcast(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> "tuple[Tensor, Tensor, Tensor]":
    """The three with the same dimensions, (..., heads, rows, head_dim) with at least one before the heads. Keys and values have as many heads as
    each other, which divide those of the queries.
    """
    dims = max(4, query.dim(), key.dim(), value.dim())
    query, key, value = (x if x.dim() == dims else x[(None,) * (dims - x.dim())] for x in (query, key, value))
    q, k, v = query.shape[-3], key.shape[-3], value.shape[-3]
    if grouped:
        if 0 in (k, v) or q % k != 0 or q % v != 0:
            raise ValueError(
                f"query has {q} heads, key {k} and value {v}; enable_gqa=True needs divisors of the heads of query"
            )
        if k != v:  # PyTorch repeats each up to the queries' heads
            key, value = key.repeat_interleave(q // k, -3), value.repeat_interleave(q // v, -3)
        heads = (q, key.shape[-3], value.shape[-3])
    else:
        every = max(q, k, v)
        if any(n not in (1, every) for n in (q, k, v)):
            raise ValueError(f"query has {q} heads, key {k} and value {v}; enable_gqa=True lets them share keys")
        heads = (every, k, v) if k == v else (every, every, every)
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"query, key and value have shapes {shapes}, whose dimensions before the heads do not broadcast"
        ) from error
    query, key, value = (_expand(x, (*batch, n)) for x, n in zip((query, key, value), heads))
    return query, key, value


def _mask(mask: Tensor, full: Sequence[int]) -> Tensor:
    """A mask that broadcasts to `full`, (..., heads, rows, columns), as the library takes it: with one dimension before the heads."""
    if mask.dim() > len(full) or any(n not in (1, m) for n, m in zip(reversed(mask.shape), reversed(full))):
        raise ValueError(f"attn_mask has shape {tuple(mask.shape)}, which does not broadcast to {tuple(full)}")
    mask = mask[(None,) * (len(full) - mask.dim())]
    if mask.dim() == 4:
        return mask
    if any(n != 1 for n in mask.shape[:-3]):
        mask = mask.expand(*full[:-3], *mask.shape[-3:])
    return mask.flatten(0, -4)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention on (..., heads, rows, head_dim), (heads, rows, head_dim) or (rows, head_dim).

    Dimensions before the rows broadcast; keys and values of one head are not copied. A mask of bool is read in place, a mask of numbers
    is a bias and may need a gradient. Two differences: a row that sees no key gives 0, not NaN, and `attn_mask` may be given together with
    `is_causal`. scale must be positive.
    """
    numbers: Dict[str, Any] = {}
    if is_causal:
        numbers["causal"] = 2
    if scale is not None:
        if not scale > 0:
            raise ValueError(f"scale is {scale}; it must be positive, or None for 1 / sqrt(head_dim)")
        numbers["scale"] = scale
    if dropout_p != 0:
        numbers["dropout_p"] = dropout_p

    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    dims = max(len(q_shape), len(k_shape), len(v_shape))
    if (
        len(q_shape) == len(k_shape) == len(v_shape) == 4
        and q_shape[0] == k_shape[0] == v_shape[0]
        and q_shape[1] == k_shape[1] == v_shape[1]
    ):
        q, k, v = query, key, value
    else:
        for name, shape in (("query", q_shape), ("key", k_shape), ("value", v_shape)):
            if len(shape) < 2:
                raise ValueError(f"{name} has {len(shape)} dimensions; it needs (..., rows, head_dim)")
        query, key, value = _broadcast(query, key, value, enable_gqa)
        q, k, v = (x if x.dim() == 4 else x.flatten(0, -4) for x in (query, key, value))
    tensors: Dict[str, Any] = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    if attn_mask is not None:
        mask = _mask(attn_mask, (*query.shape[:-1], key.shape[-2]))
        if mask.dtype == torch.bool:
            tensors["element_mask"] = mask
        else:
            tensors["bias"] = _every_column(mask, k.shape[2])
    out = _call(tensors, numbers)[0].transpose(1, 2)
    if dims == 4:
        return out
    return out.unflatten(0, query.shape[:-3]) if dims > 4 else out[(0,) * (4 - dims)]
