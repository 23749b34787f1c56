# SPDX-License-Identifier: Apache-2.0
"""Attention for PyTorch 2.4 and newer: differentiable, on CPU and CUDA tensors, whole under torch.compile and in CUDA graphs.

    from flashattn.torch import attention, scaled_dot_product_attention
    out = attention(q, k, v, causal=True)                                     # (batch, rows, heads, head_dim)
    out = scaled_dot_product_attention(query, key, value, is_causal=True)     # (batch, heads, rows, head_dim)

Two custom operators, `flashattn::forward` and `flashattn::backward`, carry the calls; they run on PyTorch's current stream.
"""

import threading
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from ._context import Context

__all__ = ["attention", "scaled_dot_product_attention"]

_local = threading.local()
_MASKS = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}
_CAUSAL = {0: False, 1: "bottom_right", 2: "top_left"}


def _context(device: torch.device) -> Context:
    """This thread's context of a device; the library takes no memory of it before its first call."""
    contexts = _local.__dict__.setdefault("contexts", {})
    if device not in contexts:
        if device.type not in ("cpu", "cuda"):
            raise TypeError(f"flashattn has no kernels for tensors on {device}")
        contexts[device] = Context(device.type, device.index or 0)
    return contexts[device]


def _stream(tensor: Tensor) -> Optional[int]:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


def _plain(tensor: Tensor) -> Tensor:
    """Without its history, which DLPack refuses, and with a last stride of 1, which the library wants."""
    tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) == 1 else tensor.contiguous()


def _options(
    bias: Optional[Tensor],
    sink: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    block_mask: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_q: Optional[Tensor],
    seqused_k: Optional[Tensor],
    dropout_seed: Optional[Tensor],
    block_size: List[int],
    max_seqlens: List[int],
    mask: int,
    window: List[int],
    scale: Optional[float],
    softcap: float,
    alibi_log_scale: float,
    dropout_p: float,
    deterministic: bool,
) -> dict:
    """Arguments of the operators as keyword arguments of Context."""
    left, right = window
    return dict(
        bias=bias if bias is None else bias.detach(),
        sink=sink if sink is None else sink.detach(),
        alibi_slopes=alibi_slopes if alibi_slopes is None else alibi_slopes.detach(),
        block_mask=block_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        dropout_seed=0 if dropout_seed is None else dropout_seed,
        block_size=(block_size[0], block_size[1]),
        max_seqlen_q=max_seqlens[0],
        max_seqlen_k=max_seqlens[1],
        causal=_CAUSAL[mask],
        window=(None if left < 0 else left, None if right < 0 else right),
        scale=scale,
        softcap=softcap,
        alibi_log_scale=alibi_log_scale,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )


def _lse_shape(q: Tensor) -> List[int]:
    return [*q.shape[:-3], q.shape[-2], q.shape[-3]]


# The operators' arguments after q, k and v, in the order of _options().
_OPTION_SCHEMA = (
    "Tensor? bias, Tensor? sink, Tensor? alibi_slopes, Tensor? block_mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? dropout_seed, int[] block_size, int[] max_seqlens, int mask, int[] window, float? scale, float softcap, "
    "float alibi_log_scale, float dropout_p, bool deterministic"
)


@torch.library.custom_op(
    "flashattn::forward", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_OPTION_SCHEMA}) -> (Tensor, Tensor)"
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tuple[Tensor, Tensor]:
    options = _options(*rest)
    return _context(q.device).forward(_plain(q), _plain(k), _plain(v), stream=_stream(q), **options)


@_forward.register_fake
def _forward_shapes(q, k, v, *_):
    return q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty(_lse_shape(q), dtype=torch.float32)


@torch.library.custom_op(
    "flashattn::backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needed, Tensor q, Tensor k, Tensor v, {_OPTION_SCHEMA}) -> Tensor[]",
)
def _backward(
    dout: Tensor, dlse: Optional[Tensor], out: Tensor, lse: Tensor, needed: List[bool], q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> List[Tensor]:
    options = _options(*rest)
    names = ("dq", "dk", "dv", "dbias", "dsink")
    unwanted = {name: False for name, wanted in zip(names, needed) if not wanted}
    q, k, v, dout, out, lse = (_plain(tensor) for tensor in (q, k, v, dout, out, lse))
    dlse = dlse if dlse is None else dlse.detach()
    results = _context(q.device).backward(dout, q, k, v, out, lse, dlse=dlse, stream=_stream(q), **unwanted, **options)
    # An operator cannot return None in a list: what was not asked for is an empty tensor.
    return [q.new_empty(0) if result is None else result for result in results]


@_backward.register_fake
def _backward_shapes(dout, dlse, out, lse, needed, q, k, v, bias, sink, *_):
    return [
        like.new_empty(like.shape) if wanted and like is not None else q.new_empty(0)
        for wanted, like in zip(needed, (q, k, v, bias, sink))
    ]


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:12], *output)
    ctx.rest = inputs[12:]


def _gradients(ctx, dout, dlse):
    *tensors, out, lse = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:5])
    nothing: List[Optional[Tensor]] = [None] * (len(tensors) + len(ctx.rest))
    if dout is None and dlse is None:
        return tuple(nothing)
    if dout is None:
        dout = torch.zeros_like(out)
    results = _backward(dout, dlse, out, lse, needed, *tensors, *ctx.rest)
    return tuple(result if wanted else None for result, wanted in zip(results, needed)) + tuple(nothing[5:])


torch.library.register_autograd("flashattn::forward", _gradients, setup_context=_setup_context)


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
    block_size: "tuple[int, int]" = (0, 0),
    dropout_p: float = 0.0,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    deterministic: Optional[bool] = None,
    return_lse: bool = False,
) -> "Tensor | tuple[Tensor, Tensor]":
    """softmax(scale q k^T + ..., masked) v of (batch, rows, heads, head_dim), or of packed (total, heads, head_dim) with `cu_seqlens`.

    Options mean what `flashattn.Options` says. Gradients flow to q, k, v, bias and sink, also through the lse that return_lse=True adds.
    Dropout draws its seed from PyTorch's generator of the device. deterministic=None follows torch.use_deterministic_algorithms().
    """
    if causal not in _MASKS:
        raise ValueError(f"causal is {causal!r}; it must be one of {', '.join(map(repr, _MASKS))}")
    seed = None
    if dropout_p > 0:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    left, right = window
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if scale == 0:
        raise ValueError("scale is 0; it must be positive, or None for 1 / sqrt(head_dim)")
    out, lse = _forward(
        q,
        k,
        v,
        bias,
        sink,
        alibi_slopes,
        block_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        seed,
        list(block_size),
        [max_seqlen_q, max_seqlen_k],
        _MASKS[causal],
        [-1 if left is None else left, -1 if right is None else right],
        scale,
        float(softcap),
        float(alibi_log_scale),
        float(dropout_p),
        deterministic,
    )
    return (out, lse) if return_lse else out


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
    """torch.nn.functional.scaled_dot_product_attention on (batch, heads, rows, head_dim) or (heads, rows, head_dim).

    Two differences: a row that sees no key gives 0, not NaN, and `attn_mask` may be given together with `is_causal`.
    """
    if query.dim() == 3:
        mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        q, k, v = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        return scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
    if query.dim() != 4:
        raise ValueError(
            f"query has {query.dim()} dimensions; it needs (batch, heads, rows, head_dim) or (heads, rows, head_dim)"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; enable_gqa=True lets them share keys")
    bias = None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            bias = attn_mask
        bias = bias.view((1,) * (4 - bias.dim()) + tuple(bias.shape))
        bias = bias.expand(*bias.shape[:3], key.shape[2])  # the library broadcasts the other dimensions by itself
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal="top_left" if is_causal else False,
        scale=scale,
        bias=bias,
        dropout_p=dropout_p,
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)
