# SPDX-License-Identifier: Apache-2.0
"""Score functions: their texts for the section `score`, what they read, and the same functions for FlexAttention."""

from __future__ import annotations

import torch

from . import cases

BY_BATCH, BY_HEAD, BY_QUERY, BY_KEY, BY_ANY = 1, 2, 4, 8, 16
REACH = 64

TEXTS = {
    "softcap": """
template <class real> real score(real s, const Position &, const Aux &aux) {
  const float cap = aux.scalars[0];
  return cap * tanh(s / cap);
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
  return s * (1 + tanh(of_pair(aux, 0, p) * s)) / 2;
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
}


def tensors(name, q, seqlen_k):
    """The tensors of a function with their access, and its scalars."""
    (seqlen_q, heads), device = q.shape[1:3], q.device
    if name == "softcap":
        return [], [cases.SOFTCAP]
    if name == "alibi":
        slopes = torch.tensor(cases.alibi_slopes(heads), device=device)
        return [(slopes.view(1, heads, 1, 1), BY_HEAD)], []
    if name == "bias":
        return [(torch.randn(1, heads, seqlen_q, seqlen_k, device=device, dtype=q.dtype), BY_HEAD | BY_QUERY | BY_KEY)], []
    if name == "relative":
        return [(torch.randn(heads, 2 * REACH + 1, device=device), BY_ANY)], []
    if name == "gate":
        return [(torch.rand(1, heads, seqlen_q, 1, device=device), BY_HEAD | BY_QUERY)], []
    ids = (torch.arange(seqlen_k, device=device) * cases.DOCUMENTS // seqlen_k).to(torch.int32)
    return [(ids.view(1, 1, seqlen_q, 1), BY_QUERY), (ids.view(1, 1, 1, seqlen_k), BY_KEY)], []


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
    if name == "gate":
        gate = data[0][0, :, :, 0]
        return lambda s, b, h, i, j: s * (1 + torch.tanh(gate[h, i] * s)) / 2, None
    ids = data[0].view(-1)
    return None, lambda b, h, i, j: ids[i] == ids[j]
