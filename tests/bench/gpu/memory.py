# SPDX-License-Identifier: Apache-2.0
"""Memory of one forward and backward beside the tensors that every implementation has: q, k, v, out, lse, dout, dq, dk, dv."""

from __future__ import annotations

import torch

from gpu import cases, library, opponents

HEADS, HEAD_DIM = 16, 128
SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LARGEST_MATRIX = 16e9  # bytes: longer sequences are not tried unfused, which keeps several of them


class Unfused:
    """Attention that stores the whole matrix P, by operators of PyTorch in the inputs' dtype."""

    def __init__(self, q, k, v):
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (q, k, v))
        rows = q.shape[1]
        if 2.0 * q.shape[2] * rows * rows > LARGEST_MATRIX:
            raise RuntimeError("the matrix P is too large")
        self.hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)

    def forward(self):
        s = torch.matmul(self.q, self.k.transpose(2, 3)).mul_(self.q.shape[-1] ** -0.5).masked_fill_(self.hidden, float("-inf"))
        self.p = torch.softmax(s, -1)
        del s
        self.out = torch.matmul(self.p, self.v)

    def prepare_backward(self, dout):
        self.dout = dout.transpose(1, 2)
        self.forward()

    def backward(self):
        dv = torch.matmul(self.p.transpose(2, 3), self.dout)
        dp = torch.matmul(self.dout, self.v.transpose(2, 3))
        delta = (self.dout * self.out).sum(-1, keepdim=True)
        ds = dp.sub_(delta).mul_(self.p).mul_(self.q.shape[-1] ** -0.5)
        self.grads = [torch.matmul(ds, self.k), torch.matmul(ds.transpose(2, 3), self.q), dv]


def measure(context):
    """[{"seqlen": n, "tensors": bytes, "bytes": {contender: bytes beside them}}], causal, bf16, one sequence."""
    case = cases.square("forward", "forward", HEAD_DIM, True, SEQLENS[0])
    makers = {
        "ours": lambda q, k, v: library.Attention(context, q, k, v, causal=True),
        "fa2": lambda q, k, v: opponents.Fa2(case, q, k, v),
        "cudnn": lambda q, k, v: opponents.Cudnn(case, q, k, v),
        "unfused": Unfused,
    }
    rows = []
    for seqlen in SEQLENS:
        found = {}
        q, k, v, dout = (torch.randn(1, seqlen, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        of_all = 4 * q.numel() * 2 + HEADS * seqlen * 4  # out, dq, dk, dv and lse
        for name, make in makers.items():
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                one = make(q, k, v)
                one.forward()
                one.prepare_backward(dout)
                kept = one.backward()
            except RuntimeError:  # not for this length
                continue
            torch.cuda.synchronize()
            found[name] = max(0, torch.cuda.max_memory_allocated() - before - of_all)
            del one, kept
        rows.append({"seqlen": seqlen, "tensors": of_all + 4 * q.numel() * 2, "bytes": found})
    return rows


def text(rows):
    lines = ["\nmemory beside the tensors, MiB (causal, bf16, 16 heads of 128, forward and backward)", f"{'rows':>8s}{'tensors':>12s}"]
    names = list(dict.fromkeys(name for row in rows for name in row["bytes"]))
    lines[-1] += "".join(f"{name:>12s}" for name in names)
    for row in rows:
        cells = [f"{row['bytes'][name] / 2**20:.1f}" if name in row["bytes"] else "-" for name in names]
        lines.append(f"{row['seqlen']:8d}{row['tensors'] / 2**20:12.1f}" + "".join(f"{cell:>12s}" for cell in cells))
    return "\n".join(lines)
