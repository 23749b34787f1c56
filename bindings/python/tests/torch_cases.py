# SPDX-License-Identifier: Apache-2.0
"""What the tests of flashattn.torch share: fresh random inputs, results in poisoned memory, attention by definition in float64."""

import math
import os
import random
import sys
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest("PyTorch is not installed") from error

import flashattn
import flashattn.torch
from flashattn._torch_ops import extension

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and "cuda_archs=none" not in flashattn.build_info() else [])
SEED = int(os.environ.get("FA_TEST_SEED") or random.getrandbits(31))
print(f"FA_TEST_SEED={SEED}", file=sys.stderr)


def reference(q, k, v, visible=None, *, scale=None, bias=None, sink=None, softcap=None):
    """(out, lse) of (batch, rows, heads, head_dim), without a fused operator; differentiable. `visible` is (batch, heads, rows, keys) bool."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    x = q @ k.transpose(2, 3) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap is not None:
        x = softcap * (x / softcap).tanh()
    if bias is not None:
        x = x + bias.double()
    if visible is not None:
        x = x.masked_fill(~visible, -math.inf)
    extra = (
        x.new_full((*x.shape[:-1], 1), -math.inf) if sink is None else sink.double().view(1, -1, 1, 1).expand(*x.shape[:-1], 1)
    )
    x = torch.cat([x, extra], -1)
    hidden = (x == -math.inf).all(-1, keepdim=True)
    p = x.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    lse = x.masked_fill(hidden, 0).logsumexp(-1).masked_fill(hidden[..., 0], -math.inf)
    return (p[..., :-1] @ v).transpose(1, 2), lse


class TorchCase(unittest.TestCase):
    """Inputs differ from run to run; FA_TEST_SEED repeats them. Memory that PyTorch hands out is NaN until it is written."""

    TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}

    def setUp(self):
        self.generator = torch.Generator().manual_seed(SEED)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        if extension:
            extension.fill_results(True)
            self.addCleanup(extension.fill_results, False)
        torch.set_num_threads(1)  # more only slow such small problems down

    def normal(self, *shape, device="cpu", dtype=torch.float32, grad=True):
        return torch.randn(*shape, generator=self.generator).to(device, dtype).requires_grad_(grad)

    def coin(self, *shape, device="cpu", p=0.7):
        """bool, true with probability p."""
        return (torch.rand(*shape, generator=self.generator) < p).to(device)

    def assert_same(self, ours, theirs, given=(), computed_in=None):
        """Values, and gradients with respect to `given` for the same random gradient of the results. A gradient is as exact as its own type, or as
        `computed_in`, which it was rounded to on the way.
        """
        tolerance = self.TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance)
        if not given:
            return
        dout = self.normal(*ours.shape, device=ours.device, dtype=ours.dtype, grad=False)
        got = torch.autograd.grad(ours, given, dout)
        expected = torch.autograd.grad(theirs, given, dout.to(theirs.dtype))
        for mine, its in zip(got, expected):
            # lse is fp32, its gradients have the type of the inputs. A broadcast input's gradient is a sum, to whose error every element adds.
            summed = max(x.numel() for x in given) / mine.numel()
            tolerance = self.TOLERANCE[computed_in or mine.dtype] * summed**0.5
            torch.testing.assert_close(mine, its.to(mine.dtype), rtol=tolerance, atol=tolerance)
