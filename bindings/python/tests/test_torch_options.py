# SPDX-License-Identifier: Apache-2.0
"""Options of flashattn.torch.attention: lengths and left padding, masks as data, paged and 8-bit caches. Compared with the definition in float64."""

import unittest

from tests.torch_cases import DEVICES, TorchCase, reference

import torch

import flashattn
from flashattn.torch import attention


class OptionsTest(TorchCase):
    def qkv(self, device, batch=2, rows=13, keys=17, heads=(4, 2)):
        dtype = torch.float32 if device == "cpu" else torch.float16
        return (
            self.normal(batch, rows, heads[0], 16, device=device, dtype=dtype),
            self.normal(batch, keys, heads[1], 16, device=device, dtype=dtype),
            self.normal(batch, keys, heads[1], 16, device=device, dtype=dtype),
        )

    def check(self, qkv, visible, bias=None, **options):
        """out, lse and the gradients of both."""
        out, lse = attention(*qkv, bias=bias, return_lse=True, **options)
        visible = visible.expand(qkv[0].shape[0], qkv[0].shape[2], qkv[0].shape[1], qkv[1].shape[1])
        given = [*qkv] + ([bias] if bias is not None and bias.requires_grad else [])
        expected_out, expected_lse = reference(*qkv, visible, bias=bias)
        self.assert_same(out, expected_out, given)
        out, lse = attention(*qkv, bias=bias, return_lse=True, **options)
        seen = visible.any(-1)  # elsewhere lse is -inf and has no gradient
        self.assertTrue(bool((lse[~seen] == -torch.inf).all()))
        zero = torch.zeros_like(lse)
        self.assert_same(
            torch.where(seen, lse, zero), torch.where(seen, reference(*qkv, visible, bias=bias)[1], zero.double()), given[:2]
        )

    def integers(self, device, values):
        """The same as lists and as tensors of every type."""
        yield values
        for dtype in (torch.int64, torch.int32, torch.int16):
            yield torch.tensor(values, dtype=dtype, device=device)

    def test_lengths(self):
        for device in DEVICES:
            q, k, v = self.qkv(device, batch=3)
            keys, rows = torch.arange(17, device=device), torch.arange(13, device=device).view(13, 1)
            used_q, used_k = ([n] if isinstance(n, int) else n for n in ([13, 4, 0], [17, 6, 9]))
            lengths_q, lengths_k = (torch.tensor(n, device=device).view(3, 1, 1, 1) for n in (used_q, used_k))
            inside = (rows < lengths_q) & (keys < lengths_k)
            for as_q, as_k in zip(self.integers(device, used_q), self.integers(device, used_k)):
                with self.subTest(device=device, given=getattr(as_q, "dtype", list)):
                    self.check((q, k, v), inside, seqused_q=as_q, seqused_k=as_k)
            # causal=True: the last used query is the last used key.
            self.check(
                (q, k, v), inside & (keys <= rows + lengths_k - lengths_q), seqused_q=used_q, seqused_k=used_k, causal=True
            )
            self.check((q, k, v), (keys < lengths_k) & (keys <= rows + lengths_k - 13), seqused_k=used_k, causal=True)
            self.check((q, k, v), (keys < lengths_k) & (keys <= rows), seqused_k=used_k, causal="top_left")
        with self.assertRaisesRegex(flashattn.Error, "seqused_k"):
            attention(*self.qkv("cpu"), seqused_k=torch.tensor([3, 2**32 + 3]))  # not 3, which is what its low half says

    def test_left_padding(self):
        for device in DEVICES:
            q, k, v = self.qkv(device, batch=3, rows=17)
            first = [0, 5, 16]
            keys, rows = torch.arange(17, device=device), torch.arange(17, device=device).view(17, 1)
            visible = (keys >= torch.tensor(first, device=device).view(3, 1, 1, 1)) & (keys <= rows)
            for starts in self.integers(device, first):
                self.check((q, k, v), visible, seqstart_k=starts, causal=True)

    def test_masks_as_data(self):
        for device in DEVICES:
            qkv = self.qkv(device)
            for shape in ((2, 4, 13, 17), (1, 1, 13, 17), (2, 1, 1, 17), (1, 4, 13, 1)):
                mask = self.coin(*shape, device=device)
                self.check(qkv, mask, element_mask=mask)
                self.check(qkv, mask, element_mask=mask.to(torch.uint8))
            dtype = qkv[0].dtype
            for shape in ((1, 4, 13, 1), (2, 1, 1, 17), (1, 1, 1, 1)):
                self.check(
                    qkv,
                    torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
                    bias=self.normal(*shape, device=device, dtype=dtype),
                )
            rows, keys = torch.arange(13, device=device).view(13, 1), torch.arange(17, device=device)
            slices = [[0, 5, 0, 9, 0], [5, 13, 4, 12, 1], [2, 8, 12, 17, 0]]
            visible = (rows < 5) & (keys < 9)
            visible = visible | (rows >= 5) & (keys >= 4) & (keys < 12) & (keys <= rows - 13 + 12)
            visible = visible | (rows >= 2) & (rows < 8) & (keys >= 12)
            for given in self.integers(device, slices):
                self.check(qkv, visible, slices=given)
            counts, indices = [[[2, 1]]], [[[[0, 1], [1, 0]]]]  # blocks of 8 queries and 16 keys
            blocks = (rows < 8) | (keys >= 16)
            for n, i in zip(self.integers(device, counts), self.integers(device, indices)):
                self.check(qkv, blocks, block_counts=n, block_indices=i, block_size=(8, 16))

    def test_keys_by_index(self):
        for device in DEVICES:
            q, k, v = (x.detach() for x in self.qkv(device))
            visible = self.coin(2, 1, 13, 17, device=device)
            keys = torch.where(visible[:, 0], torch.arange(17, device=device), -1)
            close = {} if device == "cpu" else {"rtol": 1e-2, "atol": 2e-3}  # fp16, by other kernels
            for given in self.integers(device, keys.tolist()):
                out = attention(q, k, v, kv_indices=given)
                torch.testing.assert_close(out, attention(q, k, v, element_mask=visible), **close)
                mapped = torch.vmap(lambda *x: attention(*(y[None] for y in x[:3]), kv_indices=x[3][None])[0])(q, k, v, keys.int())
                torch.testing.assert_close(mapped, out, **close)

    def test_packed_with_lists(self):
        for device in DEVICES:
            q, k, v = self.qkv(device, batch=1, rows=17)
            starts = [0, 5, 17]
            sequence = torch.tensor([0] * 5 + [1] * 12, device=device)
            visible = sequence.view(17, 1) == sequence
            for given in self.integers(device, starts):
                if isinstance(given, torch.Tensor) and given.dtype == torch.int16:
                    continue
                out = attention(q[0], k[0], v[0], cu_seqlens_q=given, cu_seqlens_k=given, max_seqlen_q=12, max_seqlen_k=12)
                self.assert_same(out, reference(q, k, v, visible)[0][0], [q, k, v])

    def test_paged(self):
        for device in DEVICES:
            q, k, v = (x.detach() for x in self.qkv(device, rows=3, keys=16))
            order = torch.randperm(8, generator=self.generator)
            pages = [
                torch.full_like(x, torch.nan).reshape(8, 4, 2, 16).index_copy(0, order.to(device), x.reshape(8, 4, 2, 16))
                for x in (k, v)
            ]
            keys, rows = torch.arange(16, device=device), torch.arange(3, device=device).view(3, 1)
            used = torch.tensor([16, 7], device=device).view(2, 1, 1, 1)
            visible = (keys < used) & (keys <= rows + used - 3)
            expected = reference(q, k, v, visible)
            for table in self.integers(device, order.view(2, 4).tolist()):
                out, lse = attention(q, *pages, page_table=table, seqused_k=[16, 7], causal=True, return_lse=True)
                self.assert_same(out, expected[0])
                self.assert_same(lse, expected[1])
            many = attention(
                q, *pages, page_table=table, seqused_k=[16, 7], causal=True, num_splits=2, batch_invariant=True, max_seqlen_k=16
            )
            self.assert_same(many, expected[0])
            alone = attention(q[:1], *pages, page_table=table[:1], seqused_k=[16], causal=True, batch_invariant=True)
            self.assertTrue(
                torch.equal(
                    attention(q, *pages, page_table=table, seqused_k=[16, 7], causal=True, batch_invariant=True)[:1], alone
                )
            )

    def test_8_bit_caches(self):
        torch.use_deterministic_algorithms(False)  # PyTorch 2.4 cannot fill float8 tensors
        for device in DEVICES:
            q, k, v = (x.detach() for x in self.qkv(device))
            for dtype in (torch.int8, torch.float8_e4m3fn):
                scales = [self.normal(2, 2, device=device, grad=False).abs() + 0.1 for _ in "kv"]
                small = [(x / s[:, None, :, None] * 20).clamp(-100, 100).to(dtype) for x, s in zip((k, v), scales)]
                wide = [x.double() * s[:, None, :, None] for x, s in zip(small, scales)]
                out = attention(q, *small, k_descale=scales[0], v_descale=scales[1], scale=0.01)
                self.assert_same(out, reference(q, *wide, scale=0.01)[0])
        q8 = (q * 20).clamp(-100, 100).to(torch.float8_e4m3fn)
        scale = torch.full((2, 2), 0.05, device=device)
        # On Hopper P is e4m3, too: the tolerance is for values of about 1.
        out = attention(q8, *small, q_descale=scale, k_descale=scales[0], v_descale=scales[1] / 20, scale=0.01)
        self.assertEqual(out.dtype, torch.bfloat16)
        self.assert_same(out, reference(q8.double() * 0.05, wide[0], wide[1] / 20, scale=0.01)[0])

    def test_numbers(self):
        """Each reaches the library: an impossible value is refused by name."""
        qkv = self.qkv("cpu")
        for options, text in (
            ({"num_splits": -1}, "num_splits is -1"),
            ({"softcap": -1.0}, "softcap is -1"),
            ({"scale": -1.0}, "softmax_scale is -1"),
            ({"dropout_p": 1.5}, "dropout_p is 1.5"),
            ({"window": (-2, None)}, "window_left is -2"),
            ({"window": (None, -2)}, "window_right is -2"),
            ({"alibi_log_scale": 1.0}, "alibi_log_scale is 1"),
            ({"max_seqlen_k": -1}, "max_seqlen_k is -1"),
            ({"max_seqlen_q": -1}, "max_seqlen_q is -1"),
            ({"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_size": (0, 32)}, "block_size_q is 0"),
            ({"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_size": (32, 0)}, "block_size_k is 0"),
        ):
            with self.subTest(options=list(options)), self.assertRaisesRegex((flashattn.Error, OverflowError), text):
                attention(*qkv, **options)

    def test_hints(self):
        """Those that change no result of the CPU get to the operator."""
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append((str(function), kwargs or {}))
                return function(*args, **(kwargs or {}))

        qkv = [x.detach() for x in self.qkv("cpu")]
        for options in ({"num_splits": 3}, {"batch_invariant": True}, {"deterministic": False}, {"deterministic": True}):
            with Recorder():
                attention(*qkv, **options)
            expected = {name: value for name, value in {"deterministic": True, **options}.items() if value is not False}
            self.assertEqual(seen[-1], ("flashattn.forward.default", expected))
        torch.use_deterministic_algorithms(False)
        with Recorder():
            attention(*qkv)
        self.assertEqual(seen[-1], ("flashattn.forward.default", {}))

    def test_threads_follow_pytorch(self):
        """The context of the CPU has as many threads as PyTorch uses at the time."""
        from flashattn import _torch_ops

        before = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, before)
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            context = _torch_ops._context(torch.device("cpu"))
            self.assertEqual(context.info.num_threads, threads)
            self.assertIs(_torch_ops._context(torch.device("cpu")), context)


if __name__ == "__main__":
    unittest.main()
