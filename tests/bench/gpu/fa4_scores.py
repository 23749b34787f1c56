# SPDX-License-Identifier: Apache-2.0
"""The functions of scores.py for FlashAttention-4, in CuTe DSL: score_mod with its derivative, and mask_mod.

FlashAttention-4 recognises a function that it has compiled by its source and by the values that it captures, so what is
made here captures numbers alone. On Hopper it takes one element at a time where a function reads tensors, and two
(backward four) where it does not: ALiBi's slopes and the numbers of the masks are therefore computed or constants.
Names and order of parameters are those that it calls with."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from flash_attn.cute import utils

from . import cases, scores


@cute.jit
def unchanged(grad, s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """The derivative of a sum with the score."""
    return grad


def alibi(heads, causal):
    """Of cases.alibi_slopes(heads)."""

    @cute.jit
    def score(s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        steps = (head_idx + cute.full_like(head_idx, 1)).to(Float32)
        slope = cute.math.exp2(steps * cute.full_like(s, -8.0 / heads), fastmath=True)
        distance = (q_idx - kv_idx).to(Float32)
        if cutlass.const_expr(not causal):
            distance = cute.math.absf(distance)
        return s - slope * distance

    return score, unchanged


def bias():
    @cute.jit
    def score(s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return s + Float32(aux_tensors[0][head_idx[0], q_idx[0], kv_idx[0]])

    return score, unchanged


def relative(reach):
    @cute.jit
    def score(s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = cutlass.min(cutlass.max(kv_idx[0] - q_idx[0], -reach), reach)
        return s + Float32(aux_tensors[0][head_idx[0], distance + reach])

    return score, unchanged


def t5():
    @cute.jit
    def score(s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        ahead = (kv_idx - q_idx).to(Float32)
        n = cute.math.absf(ahead)
        far = cute.math.log2(n + 0.1, fastmath=True) * 2.0 + 2.0
        far = cute.where(far < cute.full_like(far, 15.0), far, cute.full_like(far, 15.0))
        side = cute.where(ahead > cute.full_like(n, 0.0), cute.full_like(n, 16.0), cute.full_like(n, 0.0))
        bucket = (cute.where(n < cute.full_like(n, 8.0), n, far) + side).to(Int32)
        return s + Float32(aux_tensors[0][bucket[0], head_idx[0]])

    return score, unchanged


def gate():
    @cute.jit
    def score(s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        opening = Float32(aux_tensors[0][head_idx[0], q_idx[0]])
        return s * (cute.math.tanh(s * opening, fastmath=True) * 0.5 + 0.5)

    @cute.jit
    def gradient(grad, s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        opening = Float32(aux_tensors[0][head_idx[0], q_idx[0]])
        t = cute.math.tanh(s * opening, fastmath=True)
        return grad * (t * 0.5 + 0.5 + s * (opening * 0.5) * (1.0 - t * t))

    return score, gradient


def logn(factor):
    @cute.jit
    def score(s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return s * (cute.math.log2(Float32(seqlen_info.seqlen_k + 1), fastmath=True) * factor)

    @cute.jit
    def gradient(grad, s, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return grad * (cute.math.log2(Float32(seqlen_info.seqlen_k + 1), fastmath=True) * factor)

    return score, gradient


def prefix(length):
    @cute.jit
    def visible(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return (kv_idx <= q_idx) | (kv_idx < cute.full_like(kv_idx, length))

    return visible


def documents():
    @cute.jit
    def visible(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        ids = aux_tensors[0]
        return utils.scalar_to_ssa(ids[q_idx[0]], Int32) == utils.scalar_to_ssa(ids[kv_idx[0]], Int32)

    return visible


def window_with_globals(window, count):
    @cute.jit
    def visible(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        first = cute.full_like(kv_idx, count)
        near = cute.math.absi(q_idx - kv_idx) <= cute.full_like(kv_idx, window)
        return near | (kv_idx < first) | (q_idx < first)

    return visible


def neighbourhood(width, reach):
    @cute.jit
    def visible(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        across, most = cute.full_like(q_idx, width), cute.full_like(q_idx, reach)
        rows = cute.math.absi(q_idx // across - kv_idx // across)
        columns = cute.math.absi(q_idx % across - kv_idx % across)
        return (rows <= most) & (columns <= most)

    return visible


def arguments(name, q, causal, seqlen_k):
    """What FlashAttention-4 takes for the function, and the derivative of its score_mod. Masks want blocks, too."""
    heads, data = q.shape[2], [t for t, _ in scores.tensors(name, q, seqlen_k)[0]]
    if name == "softcap":
        return dict(softcap=cases.SOFTCAP), None
    if name in ("prefix", "documents", "globals", "natten"):
        visible = {
            "prefix": lambda: prefix(seqlen_k // cases.PREFIX),
            "documents": documents,
            "globals": lambda: window_with_globals(cases.GLOBAL_WINDOW, cases.GLOBALS),
            "natten": lambda: neighbourhood(cases.IMAGE, cases.NEIGHBOURS),
        }[name]()
        return dict(mask_mod=visible, aux_tensors=[data[0].view(-1)] if name == "documents" else None), None
    score, gradient = {
        "alibi": lambda: alibi(heads, causal),
        "bias": bias,
        "relative": lambda: relative(scores.REACH),
        "gate": gate,
        "t5": t5,
        "logn": lambda: logn(cases.LOGN),
    }[name]()
    read = {"bias": lambda t: t[0], "relative": lambda t: t, "gate": lambda t: t[0, :, :, 0], "t5": lambda t: t}
    return dict(score_mod=score, aux_tensors=[read[name](data[0])] if name in read else None), gradient
