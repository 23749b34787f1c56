# SPDX-License-Identifier: Apache-2.0
"""Score functions: their texts for the section `score`, what they read, and the same functions for FlexAttention."""

from __future__ import annotations

import math

import torch

from . import cases

BY_BATCH, BY_HEAD, BY_QUERY, BY_KEY, BY_ANY = 1, 2, 4, 8, 16
REACH = 64

TEXTS = {
    "softcap": """
template <class real> real score(real s, const Position &, const Aux &aux) {
  const float cap = aux.scalars[0], inverse = aux.scalars[1];
  return cap * tanh_approx(s * inverse);
}
""",
    "alibi": """
template <class real> real score(real s, const Position &p, const Aux &aux) {
  return s - of_pair(aux, 0, p) * abs(distance(p));
}
""",
    "bias": """
template <class real> real score(real s, const Position &p, const Aux &aux) { return s + of_pair(aux, 0, p); }
""",
    "relative": f"""
template <class real> real score(real s, const Position &p, const Aux &aux) {{
  return s + element(aux, 0, p.h, clamp(p.j - diagonal(p), -{REACH}, {REACH}) + {REACH});
}}
""",
    "gate": """
template <class real> real score(real s, const Position &p, const Aux &aux) {
  return s * (0.5f + 0.5f * tanh_approx(of_pair(aux, 0, p) * s));
}
""",
    "documents": """
bool visible(const Position &p, const Aux &aux) { return of_pair(aux, 0, p) == of_pair(aux, 1, p); }
fa_score_tile tile(const Position &p, int queries, int keys, const Aux &aux) {
  Position last = p;
  last.i += queries - 1;
  last.j += keys - 1;
  const float q0 = of_pair(aux, 0, p), q1 = of_pair(aux, 0, last), k0 = of_pair(aux, 1, p), k1 = of_pair(aux, 1, last);
  if (q1 < k0 || k1 < q0) return FA_SCORE_TILE_EMPTY;
  return q0 == k1 && q1 == k0 ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;
}
""",
    # 32 buckets: distances below 8 have their own, further ones two an octave, up to 128. 0.1: against rounding.
    "t5": """
template <class real> real score(real s, const Position &p, const Aux &aux) {
  const float ahead = -distance(p), n = abs(ahead), far = 2 * log2(n + 0.1f) + 2;
  const int bucket = int(n < 8 ? n : min(far, 15.0f)) + (ahead > 0 ? 16 : 0);
  return s + element(aux, 0, bucket, p.h);
}
""",
    "logn": """
template <class real> real score(real s, const Position &p, const Aux &aux) {
  return s * (log2(p.s_k + 1.0f) * aux.scalars[0]);
}
""",
    "prefix": """
bool visible(const Position &p, const Aux &aux) { return p.j <= diagonal(p) || p.j < of_pair(aux, 0, p); }
fa_score_tile tile(const Position &p, int queries, int keys, const Aux &aux) {
  const int last = p.j + keys - 1;
  const float prefix = of_pair(aux, 0, p);
  if (p.j > diagonal(p) + queries - 1 && p.j >= prefix) return FA_SCORE_TILE_EMPTY;
  return last <= diagonal(p) || last < prefix ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;
}
""",
    "globals": f"""
constexpr int kWindow = {cases.GLOBAL_WINDOW}, kGlobals = {cases.GLOBALS};
bool visible(const Position &p, const Aux &) {{
  return abs(diagonal(p) - p.j) <= kWindow || p.j < kGlobals || p.i < kGlobals;
}}
fa_score_tile tile(const Position &p, int queries, int keys, const Aux &) {{
  const int first = diagonal(p) - (p.j + keys - 1), last = diagonal(p) + queries - 1 - p.j;  // of the distances
  if ((first > kWindow || last < -kWindow) && p.j >= kGlobals && p.i >= kGlobals) return FA_SCORE_TILE_EMPTY;
  const bool full = (first >= -kWindow && last <= kWindow) || p.j + keys <= kGlobals || p.i + queries <= kGlobals;
  return full ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;
}}
""",
    "natten": f"""
constexpr int kWidth = {cases.IMAGE}, kReach = {cases.NEIGHBOURS};
bool visible(const Position &p, const Aux &) {{
  return abs(p.i / kWidth - p.j / kWidth) <= kReach && abs(p.i % kWidth - p.j % kWidth) <= kReach;
}}
fa_score_tile tile(const Position &p, int queries, int keys, const Aux &) {{
  const int above = p.i / kWidth - (p.j + keys - 1) / kWidth, below = p.j / kWidth - (p.i + queries - 1) / kWidth;
  return above > kReach || below > kReach ? FA_SCORE_TILE_EMPTY : FA_SCORE_TILE_PARTIAL;
}}
""",
}


def tensors(name, q, seqlen_k):
    """The tensors of a function with their access, and its scalars: the same ones in every call, for all contenders."""
    (batch, seqlen_q, heads), device = q.shape[:3], q.device
    source = torch.Generator(device).manual_seed(1)
    if name == "softcap":
        return [], [cases.SOFTCAP, 1 / cases.SOFTCAP]
    if name == "logn":
        return [], [cases.LOGN]
    if name in ("globals", "natten"):
        return [], []
    if name == "alibi":
        slopes = torch.tensor(cases.alibi_slopes(heads), device=device)
        return [(slopes.view(1, heads, 1, 1), BY_HEAD)], []
    if name == "bias":
        data = torch.randn(1, heads, seqlen_q, seqlen_k, device=device, dtype=q.dtype, generator=source)
        return [(data, BY_HEAD | BY_QUERY | BY_KEY)], []
    if name == "relative":
        return [(torch.randn(heads, 2 * REACH + 1, device=device, generator=source), BY_ANY)], []
    if name == "t5":
        return [(torch.randn(32, heads, device=device, generator=source), BY_ANY)], []
    if name == "gate":
        return [(torch.rand(1, heads, seqlen_q, 1, device=device, generator=source), BY_HEAD | BY_QUERY)], []
    if name == "prefix":
        lengths = torch.full((batch, 1, 1, 1), seqlen_k // cases.PREFIX, dtype=torch.int32, device=device)
        return [(lengths, BY_BATCH)], []
    ids = (torch.arange(seqlen_k, device=device) * cases.DOCUMENTS // seqlen_k).to(torch.int32)
    return [(ids.view(1, 1, seqlen_q, 1), BY_QUERY), (ids.view(1, 1, 1, seqlen_k), BY_KEY)], []


def t5_bucket(ahead):
    n = ahead.abs()
    far = (2 * torch.log2(n + 0.1) + 2).clamp(max=15).to(torch.int32)
    return torch.where(n < 8, n, far) + torch.where(ahead > 0, 16, 0)


def for_flex(name, q, seqlen_k):
    """score_mod and mask_mod of FlexAttention for the same function; either may be None."""
    data = [t for t, _ in tensors(name, q, seqlen_k)[0]]
    if name == "softcap":
        return lambda s, b, h, i, j: cases.SOFTCAP * torch.tanh(s / cases.SOFTCAP), None
    if name == "alibi":
        slopes = data[0].view(-1)
        return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), None
    if name == "bias":
        bias = data[0][0]
        return lambda s, b, h, i, j: s + bias[h, i, j], None
    if name == "relative":
        table = data[0]
        return lambda s, b, h, i, j: s + table[h, (j - i).clamp(-REACH, REACH) + REACH], None
    if name == "t5":
        table = data[0]
        return lambda s, b, h, i, j: s + table[t5_bucket(j - i), h], None
    if name == "logn":
        factor = math.log2(seqlen_k + 1) * cases.LOGN
        return lambda s, b, h, i, j: s * factor, None
    if name == "gate":
        gate = data[0][0, :, :, 0]
        return lambda s, b, h, i, j: s * (1 + torch.tanh(gate[h, i] * s)) / 2, None
    if name == "prefix":
        lengths = data[0].view(-1)
        return None, lambda b, h, i, j: (j <= i) | (j < lengths[b])
    if name == "globals":
        window, count = cases.GLOBAL_WINDOW, cases.GLOBALS
        return None, lambda b, h, i, j: ((i - j).abs() <= window) | (j < count) | (i < count)
    if name == "natten":
        width, most = cases.IMAGE, cases.NEIGHBOURS

        def near(i, j):
            return (i - j).abs() <= most

        return None, lambda b, h, i, j: near(i // width, j // width) & near(i % width, j % width)
    ids = data[0].view(-1)
    return None, lambda b, h, i, j: ids[i] == ids[j]


def visible_blocks(name, q, seqlen_k, size):
    """Blocks of pairs that are visible as a whole, and those of which some are: (blocks of queries, blocks of keys)."""
    mask, device = for_flex(name, q, seqlen_k)[1], q.device
    keys, none = torch.arange(seqlen_k, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
    full, some = [], []
    for first in range(0, q.shape[1], size):
        visible = mask(none, none, torch.arange(first, first + size, device=device)[:, None], keys).view(size, -1, size)
        full.append(visible.all(2).all(0))
        some.append(visible.any(2).any(0))
    full, some = torch.stack(full), torch.stack(some)
    return full, some & ~full
