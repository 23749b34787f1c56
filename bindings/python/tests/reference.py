# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients by definition, in float64."""

import numpy as np


def mask_of(rows, columns, causal=False, window=(None, None)):
    """(rows, columns) bool: which keys each query sees."""
    shift = 0 if causal == "top_left" else columns - rows
    distance = np.arange(columns)[None, :] - np.arange(rows)[:, None] - shift
    visible = np.ones((rows, columns), bool)
    if causal:
        visible &= distance <= 0
    if window[0] is not None:
        visible &= distance >= -window[0]
    if window[1] is not None:
        visible &= distance <= window[1]
    return visible


def forward(q, k, v, *, causal=False, window=(None, None), scale=None, softcap=0.0, bias=None, sink=None):
    """q (b, s, h, d), k, v (b, t, h_k, d): returns out, lse and what `backward` needs."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scale = scale if scale is not None else q.shape[-1] ** -0.5
    x = scale * np.einsum("bihd,bjhd->bhij", q, k)
    slope = np.ones_like(x)
    if softcap > 0:
        t = np.tanh(x / softcap)
        x, slope = softcap * t, 1 - t * t
    if bias is not None:
        x = x + np.asarray(bias, np.float64)
    x = np.where(mask_of(q.shape[1], k.shape[1], causal, window), x, -np.inf)
    extra = np.full(q.shape[2], -np.inf) if sink is None else np.asarray(sink, np.float64)
    top = np.maximum(x.max(-1), extra[None, :, None])
    top = np.where(np.isfinite(top), top, 0)
    exps = np.exp(x - top[..., None])
    sink_exp = np.exp(extra[None, :, None] - top)
    total = exps.sum(-1) + sink_exp
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    total = np.where(total > 0, total, 1)
    p = exps / total[..., None]
    return np.einsum("bhij,bjhd->bihd", p, v), lse, (p, sink_exp / total, slope, scale, group)


def backward(dout, dlse, q, k, v, out, saved):
    """Returns dq, dk, dv, the gradient of the masked logits (b, h, i, j), and dsink."""
    p, sink_p, slope, scale, group = saved
    dout, q, k, v, out = (np.asarray(x, np.float64) for x in (dout, q, k, v, out))
    k_all, v_all = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    delta = np.einsum("bihd,bihd->bhi", dout, out) - (0 if dlse is None else np.asarray(dlse, np.float64))
    dp = np.einsum("bihd,bjhd->bhij", dout, v_all)
    dx = p * (dp - delta[..., None])
    ds = dx * slope * scale
    dq = np.einsum("bhij,bjhd->bihd", ds, k_all)

    def per_key_head(x):
        b, t, _, d = x.shape
        return x.reshape(b, t, -1, group, d).sum(3)

    dk = per_key_head(np.einsum("bhij,bihd->bjhd", ds, q))
    dv = per_key_head(np.einsum("bhij,bihd->bjhd", p, dout))
    return dq, dk, dv, dx, -(sink_p * delta).sum((0, 2))
