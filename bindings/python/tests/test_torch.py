# SPDX-License-Identifier: Apache-2.0
"""flashattn.torch against PyTorch's own attention: values, gradients, torch.compile, operator checks."""

import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest("PyTorch is not installed") from error

import flashattn
from flashattn.torch import attention, scaled_dot_product_attention

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and "cuda_archs=none" not in flashattn.build_info() else [])


def normal(seed, *shape, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


def inputs(device="cpu", dtype=torch.float32, heads_k=4, rows_k=29):
    return (
        normal(1, 2, 4, 23, 16, device=device, dtype=dtype),
        normal(2, 2, heads_k, rows_k, 16, device=device, dtype=dtype),
        normal(3, 2, heads_k, rows_k, 16, device=device, dtype=dtype),
    )


class TorchTest(unittest.TestCase):
    def assert_same(self, ours, theirs, given, tolerance=3e-5):
        """Values, and gradients with respect to `given` for the same random gradient of the results."""
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        dout = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9)).to(ours)
        for got, expected in zip(*(torch.autograd.grad(result, given, dout, retain_graph=True) for result in (ours, theirs))):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)

    def test_like_sdpa(self):
        for device in DEVICES:
            dtype, tolerance = (torch.float32, 3e-5) if device == "cpu" else (torch.float16, 4e-3)
            q, k, v = inputs(device, dtype)
            float_mask = normal(4, 1, 4, 23, 29, device=device, dtype=dtype)
            bool_mask = torch.rand(23, 29, generator=torch.Generator().manual_seed(5)).to(device) > 0.3
            bool_mask[:, 0] = True  # PyTorch gives NaN where nothing is visible
            for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": float_mask}, {"attn_mask": bool_mask}):
                with self.subTest(device=device, options=list(options)):
                    ours = scaled_dot_product_attention(q, k, v, **options)
                    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
                    given = [q, k, v] + ([float_mask] if options.get("attn_mask") is float_mask else [])
                    self.assert_same(ours, theirs, given, tolerance)

    def test_grouped_heads_and_three_dimensions(self):
        q, k, v = inputs(heads_k=2)
        with self.assertRaisesRegex(ValueError, "enable_gqa"):
            scaled_dot_product_attention(q, k, v)
        ours = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        self.assert_same(ours, theirs, [q, k, v])
        q, k, v = (x.detach()[0].requires_grad_() for x in inputs())
        self.assert_same(
            scaled_dot_product_attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), [q, k, v]
        )

    def test_half_precision(self):
        for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
            q, k, v = inputs(dtype=dtype)
            ours = scaled_dot_product_attention(q, k, v, is_causal=True)
            self.assertEqual(ours.dtype, dtype)
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            self.assert_same(ours, theirs, [q, k, v], tolerance)

    def test_gradient_through_lse_and_sink(self):
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in inputs())
        sink = normal(6, 4)
        out, lse = attention(q, k, v, sink=sink, return_lse=True)
        logits = torch.einsum("bihd,bjhd->bhij", q, k) / 4
        with_sink = torch.cat([logits, sink.view(1, 4, 1, 1).expand(2, 4, 23, 1)], -1)
        self.assert_same(lse, with_sink.logsumexp(-1), [q, k, sink])
        out, lse = attention(q, k, v, sink=sink, return_lse=True)
        p = with_sink.softmax(-1)[..., :-1]
        self.assert_same(out, torch.einsum("bhij,bjhd->bihd", p, v), [q, k, v, sink])
        only_lse = torch.autograd.grad(attention(q, k, v, return_lse=True)[1].sum(), [q, v])
        self.assertGreater(float(only_lse[0].abs().max()), 0)
        self.assertEqual(float(only_lse[1].abs().max()), 0)

    def test_packed_sequences(self):
        q, k, v = normal(1, 12, 2, 16), normal(2, 12, 2, 16), normal(3, 12, 2, 16)
        starts = torch.tensor([0, 5, 12], dtype=torch.int32)
        ours = attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=7, max_seqlen_k=7)
        theirs = torch.cat([attention(q[None, a:b], k[None, a:b], v[None, a:b], causal=True)[0] for a, b in ((0, 5), (5, 12))])
        self.assert_same(ours, theirs, [q, k, v])

    def test_dropout_follows_the_generator(self):
        q, k, v = inputs()
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        self.assertTrue(torch.equal(results[0], results[1]))
        self.assertFalse(torch.equal(results[0], results[2]))
        # The backward pass drops the same elements of P: d(sum out) / dv adds up to the fraction that is kept, times 2.
        torch.manual_seed(3)
        out = scaled_dot_product_attention(q, k, torch.ones_like(v).requires_grad_(), dropout_p=0.5)
        ones = torch.ones_like(v).requires_grad_()
        torch.manual_seed(3)
        again = scaled_dot_product_attention(q, k, ones, dropout_p=0.5)
        (dv,) = torch.autograd.grad(again.sum(), [ones])
        torch.testing.assert_close(dv.sum(), out.sum())

    def test_gradcheck_of_what_is_frozen(self):
        q, k, v = inputs()
        out = scaled_dot_product_attention(q, k.detach(), v.detach())
        (dq,) = torch.autograd.grad(out.sum(), [q])
        self.assertEqual(dq.shape, q.shape)
        with torch.no_grad():
            self.assertFalse(scaled_dot_product_attention(q, k, v).requires_grad)

    def test_operator_checks(self):
        """PyTorch's own checks of schema, fake tensors and AOT dispatch. Derivatives are not the operators' affair."""
        q, k, v = (x.detach().transpose(1, 2) for x in inputs())
        bias, sink = normal(4, 1, 4, 23, 29).detach(), normal(5, 4).detach()
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
        dropped = {"dropout_seed": torch.tensor([7]), "dropout_p": 0.5, "window_left": 3}
        for options in ({}, {"causal": 1}, {"bias": bias, "sink": sink, "softcap": 2.0}, dropped):
            torch.library.opcheck(torch.ops.flashattn.forward.default, (q, k, v), options, test_utils=tests)
            out, lse = torch.ops.flashattn.forward(q, k, v, **options)
            for needed in ([True, True, True, "bias" in options, "sink" in options], [False, True, False, False, False]):
                arguments = (torch.ones_like(out), None, out, lse, needed, q, k, v)
                torch.library.opcheck(torch.ops.flashattn.backward.default, arguments, options, test_utils=tests)

    def test_compile(self):
        def block(q, k, v):
            return scaled_dot_product_attention(q * 2, k, v, is_causal=True).relu().sum()

        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        q, k, v = inputs()
        expected = torch.autograd.grad(block(q, k, v), [q, k, v])
        for rows in (29, 31):  # again with another size, which makes sizes symbolic
            q, k, v = inputs(rows_k=rows)
            torch.testing.assert_close(compiled(q, k, v), block(q, k, v))
            expected = torch.autograd.grad(block(q, k, v), [q, k, v])
            for got, wanted in zip(torch.autograd.grad(compiled(q, k, v), [q, k, v]), expected):
                torch.testing.assert_close(got, wanted)
        dropped = torch.compile(
            lambda q: scaled_dot_product_attention(q, q, q, dropout_p=0.5), fullgraph=True, backend="aot_eager"
        )
        self.assertFalse(torch.equal(dropped(q), dropped(q)))

    def test_strides(self):
        q, k, v = (x.detach() for x in inputs())
        expected = scaled_dot_product_attention(q, k, v)
        columns_first = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
        self.assertNotEqual(columns_first[0].stride(-1), 1)
        torch.testing.assert_close(scaled_dot_product_attention(*columns_first), expected)

    def test_refusals(self):
        q, k, v = inputs()
        with self.assertRaisesRegex(flashattn.Error, "FA_ERROR_SHAPE"):
            attention(q, k[..., :8], v)
        with self.assertRaisesRegex(ValueError, "causal is 'middle'"):
            attention(q, k, v, causal="middle")
        with self.assertRaisesRegex(TypeError, "seqused_k has dtype torch.float32; it must hold integers"):
            attention(q, k, v, seqused_k=torch.ones(2))
        with self.assertRaisesRegex(TypeError, "q has 2 dimensions"):
            attention(q[0, 0], k[0, 0], v[0, 0])
        with self.assertRaisesRegex(ValueError, "scale is 0"):
            attention(q, k, v, scale=0)
        with self.assertRaisesRegex((TypeError, RuntimeError), "k is on meta; it must be on cpu, where q is"):
            torch.ops.flashattn.forward.default.redispatch(
                torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), q, k.to("meta"), v
            )

    def test_results_are_tensors_where_the_queries_are(self):
        q, k, v = (x.detach().transpose(1, 2) for x in inputs())
        out, lse = flashattn.forward(q, k, v)
        self.assertIsInstance(out, torch.Tensor)
        gradients = flashattn.backward(out, q, k, v, out, lse)
        self.assertIsInstance(gradients.dk, torch.Tensor)
        self.assertEqual(flashattn.forward(*(x.bfloat16() for x in (q, k, v)))[0].dtype, torch.bfloat16)

    def test_what_is_read_without_dlpack(self):
        """Plain tensors are; those that DLPack refuses still go there."""
        q, k, v = (x.detach().transpose(1, 2) for x in inputs())
        expected, _ = flashattn.forward(q.numpy(), k.numpy(), v.numpy())
        for given in (q, q.contiguous(), torch.nn.Parameter(q, requires_grad=False)):
            torch.testing.assert_close(flashattn.forward(given, k, v)[0], torch.from_numpy(expected))
        torch.testing.assert_close(
            flashattn.forward(q.half(), k.half(), v.half())[0].float(), torch.from_numpy(expected), rtol=0, atol=4e-3
        )
        for refused in (q.clone().requires_grad_(), q.to_sparse(), q.to("meta")):
            with self.assertRaises((BufferError, ValueError, RuntimeError)):
                flashattn.forward(refused, k, v)
        with self.assertRaisesRegex(TypeError, "q is the negative of what its memory holds"):
            flashattn.forward(torch.complex(torch.zeros_like(q), -q).conj().imag, k, v)
        with self.assertRaisesRegex(flashattn.Error, "FA_ERROR_SHAPE"):
            flashattn.forward(q[None], k, v)

    def test_the_packages_own_array(self):
        own = flashattn.Array((2, 3), flashattn._abi.BFLOAT16)
        taken = torch.from_dlpack(own)
        taken.fill_(1.5)
        self.assertEqual((taken.dtype, own[1, 2]), (torch.bfloat16, 1.5))


if __name__ == "__main__":
    unittest.main()
