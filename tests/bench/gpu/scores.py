# SPDX-License-Identifier: Apache-2.0
"""Score functions of the section `score`: their texts, what they read, and the same function for FlexAttention."""

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
        return [], [30.0]
    if name == "alibi":
        slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)], device=device)
        return [(slopes.view(1, heads, 1, 1), BY_HEAD)], []
    if name == "bias":
        return [(torch.randn(1, heads, seqlen_q, seqlen_k, device=device, dtype=q.dtype), BY_HEAD | BY_QUERY | BY_KEY)], []
    if name == "relative":
        return [(torch.randn(heads, 2 * REACH + 1, device=device), BY_ANY)], []
    if name == "gate":
        return [(torch.rand(1, heads, seqlen_q, 1, device=device), BY_HEAD | BY_QUERY)], []
    ids = (torch.arange(seqlen_k, device=device) * cases.DOCUMENTS // seqlen_k).to(torch.int32)
    return [(ids.view(1, 1, seqlen_q, 1), BY_QUERY), (ids.view(1, 1, 1, seqlen_k), BY_KEY)], []


class Flex:
    """FlexAttention, compiled, with the same function."""

    name = "flex"

    def __init__(self, q, k, v, causal, name):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.tensors = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
        data = [t for t, _ in tensors(name, q, k.shape[1])[0]]
        masks = [lambda b, h, i, j: i >= j] if causal else []
        score_mod = None
        if name == "softcap":
            score_mod = lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)  # noqa: E731
        elif name == "alibi":
            slopes = data[0].view(-1)
            score_mod = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()  # noqa: E731
        elif name == "bias":
            bias = data[0][0]
            score_mod = lambda s, b, h, i, j: s + bias[h, i, j]  # noqa: E731
        elif name == "relative":
            table = data[0]
            score_mod = lambda s, b, h, i, j: s + table[h, (j - i).clamp(-REACH, REACH) + REACH]  # noqa: E731
        elif name == "gate":
            gate = data[0][0, :, :, 0]
            score_mod = lambda s, b, h, i, j: s * (1 + torch.tanh(gate[h, i] * s)) / 2  # noqa: E731
        else:
            ids = data[0].view(-1)
            masks.append(lambda b, h, i, j: ids[i] == ids[j])
        block_mask = create_block_mask(masks[0], None, None, q.shape[1], k.shape[1]) if masks else None
        compiled = torch.compile(flex_attention, dynamic=False)
        self.run = lambda: compiled(*self.tensors, score_mod=score_mod, block_mask=block_mask)

    def forward(self):
        with torch.no_grad():
            return self.run().transpose(1, 2)

    def prepare_backward(self, dout):
        self.dout = dout.transpose(1, 2)
        self.out = self.run()

    def backward(self):
        return [grad.transpose(1, 2) for grad in torch.autograd.grad(self.out, self.tensors, self.dout, retain_graph=True)]
