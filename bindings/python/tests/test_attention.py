# SPDX-License-Identifier: Apache-2.0
"""Forward, backward and merge against the float64 reference, on arrays of every layout."""

import threading
import unittest

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest("NumPy is not installed") from error

import flashattn

from . import reference

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


class Exporter:
    """Has nothing but DLPack, as a tensor of another framework would."""

    def __init__(self, array, modern=True):
        self.array, self.modern = array, modern

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments):
        if not self.modern and arguments:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**arguments) if self.modern else self.array.__dlpack__()


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class AttentionTest(unittest.TestCase):
    def assert_close(self, actual, expected, tolerance=2e-6, what=""):
        actual = np.asarray(actual, np.float64)
        self.assertEqual(actual.shape, expected.shape, what)
        self.assertTrue(np.array_equal(np.isinf(actual), np.isinf(expected)), what)
        finite = np.isfinite(expected)
        error = np.abs(actual - expected)[finite].max(initial=0.0)
        self.assertLessEqual(error, tolerance * max(1.0, np.abs(expected[finite]).max(initial=0.0)), what)

    def check(self, q, k, v, tolerance=2e-6, view=lambda x: x, **options):
        """Forward and backward of the arrays as `view` presents them."""
        bias, sink = options.get("bias"), options.get("sink")
        expected, expected_lse, saved = reference.forward(q, k, v, **options)
        given = {name: view(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
        out, lse = flashattn.forward(view(q), view(k), view(v), **given)
        self.assert_close(out, expected, tolerance, "out")
        self.assert_close(lse, expected_lse, tolerance, "lse")

        dout, dlse = normal(7, *expected.shape).astype(q.dtype), normal(8, *expected_lse.shape)
        got = flashattn.backward(view(dout), view(q), view(k), view(v), out, lse, dlse=view(dlse), **given)
        dlse = np.where(np.isfinite(expected_lse), dlse, 0)
        dq, dk, dv, dx, dsink = reference.backward(dout, dlse, q, k, v, np.asarray(out), saved)
        self.assert_close(got.dq, dq, 5 * tolerance, "dq")
        self.assert_close(got.dk, dk, 5 * tolerance, "dk")
        self.assert_close(got.dv, dv, 5 * tolerance, "dv")
        if bias is not None:
            axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1 and dx.shape[axis] != 1)
            self.assert_close(got.dbias, dx.sum(axes, keepdims=True), 5 * tolerance, "dbias")
        else:
            self.assertIsNone(got.dbias)
        if sink is not None:
            self.assert_close(got.dsink, dsink, 5 * tolerance, "dsink")
        else:
            self.assertIsNone(got.dsink)

    def test_plain(self):
        self.check(normal(1, 2, 33, 4, 24), normal(2, 2, 47, 4, 24), normal(3, 2, 47, 4, 24))

    def test_grouped_heads_and_value_head_dim(self):
        self.check(normal(1, 1, 20, 6, 16), normal(2, 1, 30, 2, 16), normal(3, 1, 30, 2, 40))

    def test_masks(self):
        q, k, v = normal(1, 1, 40, 2, 8), normal(2, 1, 31, 2, 8), normal(3, 1, 31, 2, 8)
        for options in (
            {"causal": True},
            {"causal": "top_left"},
            {"window": (5, None)},
            {"window": (None, 3)},
            {"window": (4, 0), "causal": True},
        ):
            with self.subTest(**options):
                self.check(q, k, v, **options)

    def test_logit_options(self):
        q, k, v = normal(1, 2, 17, 4, 8), normal(2, 2, 19, 2, 8), normal(3, 2, 19, 2, 8)
        for options in (
            {"scale": 0.7},
            {"softcap": 1.5},
            {"bias": normal(4, 2, 4, 17, 19)},
            {"bias": normal(4, 1, 4, 1, 19)},
            {"sink": normal(5, 4), "causal": True},
        ):
            with self.subTest(options=list(options)):
                self.check(q, k, v, **options)

    def test_alibi_is_a_bias(self):
        q, k, v = normal(1, 1, 9, 2, 8), normal(2, 1, 12, 2, 8), normal(3, 1, 12, 2, 8)
        slopes = np.array([0.5, 0.25], np.float32)
        distance = np.abs(np.arange(9)[:, None] + 3 - np.arange(12)[None, :])
        expected, _, _ = reference.forward(q, k, v, bias=-slopes[None, :, None, None] * distance)
        self.assert_close(flashattn.forward(q, k, v, alibi_slopes=slopes)[0], expected)
        expected, _, _ = reference.forward(q, k, v, bias=-slopes[None, :, None, None] * np.log1p(0.5 * distance))
        self.assert_close(flashattn.forward(q, k, v, alibi_slopes=slopes, alibi_log_scale=0.5)[0], expected)

    def test_block_mask(self):
        q, k, v = normal(1, 1, 8, 1, 8), normal(2, 1, 8, 1, 8), normal(3, 1, 8, 1, 8)
        blocks = np.array([[[[True, False], [True, True]]]])
        bias = np.where(np.kron(blocks[0, 0], np.ones((4, 4))), 0, -np.inf)
        expected, _, _ = reference.forward(q, k, v, bias=bias[None, None])
        self.assert_close(flashattn.forward(q, k, v, block_mask=blocks, block_size=(4, 4))[0], expected)

    def test_masks_as_data(self):
        q, k, v, dout = normal(1, 2, 9, 2, 8), normal(2, 2, 20, 2, 8), normal(3, 2, 20, 2, 8), normal(4, 2, 9, 2, 8)
        visible = np.random.default_rng(5).random((2, 1, 9, 20)) < 0.5
        visible[:, :, :, 3] = True
        by_rows = np.zeros((1, 1, 9, 20), bool)
        by_rows[0, 0, 0:6, 4:9] = by_rows[0, 0, 2:9, 0:20] = True
        late = np.broadcast_to(np.arange(20) >= np.array([2, 7])[:, None, None, None], (2, 1, 9, 20))
        blocks = np.kron(np.array([[1, 0], [0, 1], [1, 1]]), np.ones((3, 10)))[None, None] > 0
        i32 = np.int32
        indices = np.array([[0, 9], [1, -1], [1, 0]], i32)[None, None]
        packed = flashattn.Bits(np.packbits(visible, axis=-1, bitorder="little"), 20)
        for name, mask, options in (
            ("bool", visible, {"element_mask": visible}),
            ("bits", visible, {"element_mask": packed}),
            ("slices", by_rows, {"slices": np.array([[0, 6, 4, 9, flashattn.SLICE_FULL], [2, 9, 0, 20, 0]], i32)}),
            ("starts", late, {"seqstart_k": np.array([2, 7], i32)}),
            ("lists", blocks, {"block_counts": np.full((1, 1, 3), 2, i32), "block_indices": indices, "block_size": (3, 10)}),
        ):
            with self.subTest(name):
                bias = np.where(np.broadcast_to(mask, (2, 1, 9, 20)), 0, -np.inf)
                expected, lse, saved = reference.forward(q, k, v, bias=bias)
                top = np.empty(2, np.float32)
                out = flashattn.forward(q, k, v, max_logit=top, **options)
                self.assert_close(out[0], expected)
                self.assert_close(out[1], lse)
                x = np.einsum("bihd,bjhd->bhij", q, k) / 8**0.5 + bias
                self.assert_close(top, x.max((0, 2, 3)))
                got = flashattn.backward(dout, q, k, v, *out, **options)
                dq, dk, dv, _, _ = reference.backward(dout, None, q, k, v, out[0], saved)
                self.assert_close(got.dq, dq, 1e-5)
                self.assert_close(got.dk, dk, 1e-5)
                self.assert_close(got.dv, dv, 1e-5)
        with self.assertRaisesRegex(ValueError, "20 columns of Bits need 3 bytes; the data has 2"):
            flashattn.forward(q, k, v, element_mask=flashattn.Bits(np.zeros((1, 1, 9, 2), np.uint8), 20))
        with self.assertRaisesRegex(TypeError, "uint8 with 4 dimensions"):
            flashattn.forward(q, k, v, element_mask=flashattn.Bits(np.zeros((9, 3), np.uint8), 20))

    def test_keys_by_index(self):
        q, k, v = normal(1, 2, 9, 4, 8), normal(2, 2, 20, 2, 8), normal(3, 2, 20, 2, 8)
        visible = np.random.default_rng(5).random((2, 9, 20)) < 0.3
        visible[0, 3] = False  # a query without a key
        lists = np.full((2, 9, 20), -1, np.int32)
        for b, i in np.ndindex(2, 9):
            keys = np.flatnonzero(visible[b, i])
            lists[b, i, 20 - len(keys) :] = keys[::-1]
        out, lse = flashattn.forward(q, k, v, kv_indices=lists)
        by_mask = flashattn.forward(q, k, v, element_mask=visible[:, None])
        self.assert_close(out, by_mask[0])
        self.assert_close(lse, by_mask[1])
        paged = np.random.default_rng(6).permutation(10).astype(np.int32).reshape(2, 5)
        pages = [np.empty((10, 4, 2, 8), np.float32) for _ in range(2)]
        for tensor, cache in zip((k, v), pages):
            cache[paged] = tensor.reshape(2, 5, 4, 2, 8)
        again = flashattn.forward(q, *pages, page_table=paged, kv_indices=lists)
        np.testing.assert_array_equal(again[0], out)
        with self.assertRaisesRegex(flashattn.Error, "mask is 1 .* kv_indices is given"):
            flashattn.forward(q, k, v, kv_indices=lists, causal=True)

    def test_dropout_zeroes_the_stated_share(self):
        q, k = np.zeros((1, 256, 1, 8), np.float32), np.zeros((1, 256, 1, 8), np.float32)
        v = np.zeros((1, 256, 1, 256), np.float32)
        v[0, np.arange(256), 0, np.arange(256)] = 256  # out is P, times 256
        out, _ = flashattn.forward(q, k, v, dropout_p=0.25, dropout_seed=3)
        self.assertAlmostEqual(float((out == 0).mean()), 0.25, delta=0.02)
        np.testing.assert_allclose(out[out != 0], 1 / 0.75, rtol=1e-5)
        again, _ = flashattn.forward(q, k, v, dropout_p=0.25, dropout_seed=3)
        other, _ = flashattn.forward(q, k, v, dropout_p=0.25, dropout_seed=4)
        self.assertTrue(np.array_equal(out, again))
        self.assertFalse(np.array_equal(out, other))

    def test_half_precision(self):
        dtypes = [np.float16] + ([ml_dtypes.bfloat16] if ml_dtypes else [])
        for dtype, tolerance in zip(dtypes, (2e-3, 1.6e-2)):
            with self.subTest(dtype=dtype.__name__):
                q, k, v = (normal(n, 1, 21, 2, 16).astype(dtype) for n in (1, 2, 3))
                self.check(q, k, v, tolerance, causal=True)

    def test_layouts_are_only_strides(self):
        packed = normal(1, 2, 19, 3, 4, 16)
        q, k, v = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
        self.check(q, k, v, causal=True)
        by_head = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
        self.check(*by_head, causal=True)
        self.check(q[:, ::-1], k[:, ::2], v[:, ::2])

    def test_results_land_in_given_views(self):
        q, k, v = normal(1, 2, 9, 2, 8), normal(2, 2, 9, 2, 8), normal(3, 2, 9, 2, 8)
        expected, lse = flashattn.forward(q, k, v)
        room = np.full((2, 2, 9, 16), np.nan, np.float32)  # batch, heads, rows, twice the head_dim
        out = room.transpose(0, 2, 1, 3)[..., 3:11]
        got, none = flashattn.forward(q, k, v, out=out, lse=False)
        self.assertIs(got, out)
        self.assertIsNone(none)
        self.assertTrue(np.array_equal(out, expected))
        self.assertTrue(np.isnan(room[..., :3]).all() and np.isnan(room[..., 11:]).all())

        packed = np.full((2, 9, 3, 2, 8), np.nan, np.float32)
        gradients = flashattn.backward(q, q, k, v, expected, lse)
        flashattn.backward(q, q, k, v, expected, lse, dq=packed[:, :, 0], dk=packed[:, :, 1], dv=packed[:, :, 2])
        for part, gradient in enumerate((gradients.dq, gradients.dk, gradients.dv)):
            self.assertTrue(np.array_equal(packed[:, :, part], gradient))
        self.assertEqual(flashattn.backward(q, q, k, v, expected, lse, dq=False)[0], None)

    def test_dlpack(self):
        q, k, v = normal(1, 2, 17, 2, 8), normal(2, 2, 17, 2, 8), normal(3, 2, 17, 2, 8)
        for modern in (True, False):
            with self.subTest(modern=modern):
                self.check(q, k, v, view=lambda x, modern=modern: Exporter(x, modern), causal=True)
        out = np.empty_like(q)
        flashattn.forward(Exporter(q[:, ::-1]), Exporter(k), Exporter(v), out=Exporter(out))
        self.assertTrue(np.array_equal(out, flashattn.forward(q[:, ::-1], k, v)[0]))

    def test_jvp(self):
        """Tangents against central differences of the float64 reference."""
        arrays = [normal(1, 2, 9, 4, 16), normal(2, 2, 12, 2, 16), normal(3, 2, 12, 2, 8)]
        moves = [normal(n, *x.shape) for n, x in enumerate(arrays, 4)]
        options = dict(causal=True, window=(7, None), softcap=3.0, scale=0.4)
        out, lse = flashattn.forward(*arrays, **options)
        exact = [t.astype(np.float64) for t in moves]
        for given in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            step = 1e-5
            ahead, behind = (
                reference.forward(*(x + sign * step * on * t for x, t, on in zip(arrays, exact, given)), **options)
                for sign in (1.0, -1.0)
            )
            tangents = {name: t for name, t, on in zip(("tq", "tk", "tv"), moves, given) if on}
            tout, tlse = flashattn.jvp(*arrays, out, lse, **tangents, **options)
            self.assert_close(tout, (ahead[0] - behind[0]) / (2 * step), 1e-5, "tout")
            self.assert_close(tlse, (ahead[1] - behind[1]) / (2 * step), 1e-5, "tlse")
        view = np.full((2, 4, 9, 8), np.nan, np.float32).transpose(0, 2, 1, 3)
        got, none = flashattn.jvp(*arrays, out, lse, **tangents, tout=view, tlse=False, **options)
        self.assertIs(got, view)
        self.assertIsNone(none)
        np.testing.assert_array_equal(view, tout)
        plan = flashattn.query_jvp(*arrays, out, lse, **tangents, **options)
        self.assertTrue(plan.kernel.startswith("cpu_jvp_"), plan)
        for call in (flashattn.jvp, flashattn.query_jvp):
            with self.assertRaisesRegex(flashattn.Error, "sink is given, but fa_forward_jvp") as caught:
                call(*arrays, out, lse, sink=normal(9, 4))
            self.assertEqual(caught.exception.name, "FA_ERROR_UNSUPPORTED")

    def test_packed_sequences(self):
        lengths_q, lengths_k = [5, 0, 9], [7, 3, 9]
        q = normal(1, sum(lengths_q), 2, 8)
        k, v = normal(2, sum(lengths_k), 2, 8), normal(3, sum(lengths_k), 2, 8)
        for dtype in (np.int32, np.int64):
            starts_q, starts_k = (np.cumsum([0] + lengths).astype(dtype) for lengths in (lengths_q, lengths_k))
            out, lse = flashattn.forward(q, k, v, causal=True, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
            self.assertEqual(lse.shape, (2, sum(lengths_q)))
            for n in range(3):
                rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
                expected, expected_lse, _ = reference.forward(q[None, rows], k[None, keys], v[None, keys], causal=True)
                self.assert_close(out[None, rows], expected)
                self.assert_close(lse[None, :, rows], expected_lse)

    def test_rows_between_packed_sequences_are_zero(self):
        q, starts = normal(1, 6, 1, 8), np.array([1, 4], np.int32)
        out, lse = flashattn.forward(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
        gradients = flashattn.backward(q, q, q, q, out, lse, cu_seqlens_q=starts, cu_seqlens_k=starts)
        for result in (out, lse.T, gradients.dq, gradients.dk, gradients.dv):
            self.assertFalse(result[[0, 4, 5]].any())
            self.assertTrue(result[1:4].any(-1).all())

    def test_paged_keys(self):
        pages_k, pages_v = normal(1, 5, 4, 2, 8), normal(2, 5, 4, 2, 8)
        table, used = np.array([[3, 0, 4]], np.int32), np.array([10], np.int32)
        q = normal(3, 1, 3, 2, 8)
        k, v = (pages[table[0]].reshape(1, 12, 2, 8)[:, :10] for pages in (pages_k, pages_v))
        expected, _, _ = reference.forward(q, k, v, causal=True)
        self.assert_close(flashattn.forward(q, pages_k, pages_v, causal=True, page_table=table, seqused_k=used)[0], expected)

    def test_append_and_rotate(self):
        k, v, q = normal(1, 2, 3, 2, 8), normal(2, 2, 3, 2, 6), normal(3, 2, 3, 4, 8)
        k_cache, v_cache = np.full((2, 7, 2, 8), np.nan, np.float32), np.full((2, 7, 2, 6), np.nan, np.float32)
        offsets, used = np.array([0, 4], np.int32), np.zeros(2, np.int32)
        angles = np.arange(7)[:, None] * np.array([1.0, 0.5, 0.25])  # of columns c and c + 3; columns 6 and 7 stay
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        q_out = np.empty_like(q)
        flashattn.append_kv(
            k, k_cache, v, v_cache, offsets=offsets, seqused_k=used, q=q, q_out=q_out, rotary_cos=cos, rotary_sin=sin
        )
        self.assertEqual(used.tolist(), [3, 7])

        def rotated(x, first):
            c, s = cos[first : first + 3, None], sin[first : first + 3, None]
            return np.concatenate([x[..., :3] * c - x[..., 3:6] * s, x[..., :3] * s + x[..., 3:6] * c, x[..., 6:]], -1)

        for n, first in enumerate(offsets):
            rows = slice(first, first + 3)
            np.testing.assert_allclose(k_cache[n, rows], rotated(k[n], first), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(q_out[n], rotated(q[n], first), rtol=1e-5, atol=1e-6)
            self.assertTrue(np.array_equal(v_cache[n, rows], v[n]))
        self.assertTrue(np.isnan(k_cache[0, 3:]).all() and np.isnan(v_cache[1, :4]).all())
        out, _ = flashattn.forward(q_out, k_cache, v_cache, seqused_k=used)
        self.assertTrue(np.isfinite(out[0]).all())  # the other sequence began with rows that nobody wrote
        # In place, pairs side by side, and what is refused.
        again = q.copy()
        flashattn.append_kv(k, k_cache, q=again, rotary_cos=cos, rotary_sin=sin, interleaved=True)
        self.assertAlmostEqual(float(again[0, 1, 0, 0]), float(q[0, 1, 0, 0] * cos[1, 0] - q[0, 1, 0, 1] * sin[1, 0]), places=5)
        with self.assertRaises(flashattn.Error):
            flashattn.append_kv(k, k_cache, v)
        # Asking writes nothing.
        before, queries = k_cache.copy(), q.copy()
        plan = flashattn.query_append(k, k_cache, q=queries, rotary_cos=cos, rotary_sin=sin)
        self.assertRegex(plan.kernel, "append")
        self.assertEqual(plan.flops, 6 * (2 * 3) * (2 + 4) * 3)
        np.testing.assert_array_equal(k_cache, before)
        np.testing.assert_array_equal(queries, q)
        with self.assertRaises(flashattn.Error):
            flashattn.query_append(k, k_cache, v)
        with self.assertRaisesRegex(TypeError, "no argument 'ofsets'"):
            flashattn.query_append(k, k_cache, ofsets=offsets)

    def test_a_cache_in_int8(self):
        k, v, q = normal(1, 1, 5, 2, 8), normal(2, 1, 5, 2, 8), normal(3, 1, 5, 2, 8)
        k_cache, v_cache = np.zeros((1, 5, 2, 8), np.int8), np.zeros((1, 5, 2, 8), np.int8)
        k_descale, v_descale = np.zeros((1, 5, 2), np.float32), np.zeros((1, 5, 2), np.float32)
        flashattn.append_kv(k, k_cache, v, v_cache, k_descale=k_descale, v_descale=v_descale)
        np.testing.assert_allclose(k_descale, np.abs(k).max(-1) / 127, rtol=1e-6)
        np.testing.assert_allclose(k_cache * k_descale[..., None], k, atol=float(k_descale.max()) * 0.51)
        out, _ = flashattn.forward(q, k_cache, v_cache, k_descale=k_descale, v_descale=v_descale)
        exact, _, _ = reference.forward(q, k_cache * k_descale[..., None], v_cache * v_descale[..., None])
        self.assert_close(out, exact, 1e-5)
        k_descale.flags.writeable = False
        with self.assertRaisesRegex(TypeError, "k_descale is read-only"):
            flashattn.append_kv(k, k_cache, v, v_cache, k_descale=k_descale, v_descale=v_descale)

    def test_merge(self):
        q, k, v = normal(1, 2, 7, 2, 8), normal(2, 2, 30, 2, 8), normal(3, 2, 30, 2, 8)
        whole, whole_lse = flashattn.forward(q, k, v)
        parts = [flashattn.forward(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 11), (11, 12), (12, 30))]
        out, lse = flashattn.merge([part[0] for part in parts], [part[1] for part in parts])
        self.assert_close(out, whole.astype(np.float64))
        self.assert_close(lse, whole_lse.astype(np.float64))
        plan = flashattn.query_merge([part[0] for part in parts], [part[1] for part in parts])
        self.assertRegex(plan.kernel, "merge")
        self.assertEqual((plan.flops, plan.workspace_bytes), (2 * 3 * out.size, 0))
        with self.assertRaisesRegex(flashattn.Error, r"out_parts\[1\].shape"):
            flashattn.query_merge([parts[0][0], parts[1][0][:1]], [parts[0][1], parts[1][1]])

    def test_threads_have_contexts_of_their_own(self):
        q, k, v = normal(1, 1, 64, 2, 16), normal(2, 1, 64, 2, 16), normal(3, 1, 64, 2, 16)
        expected, _ = flashattn.forward(q, k, v)
        failures = []

        def work():
            for _ in range(20):
                if not np.array_equal(flashattn.forward(q, k, v)[0], expected):
                    failures.append("differs")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])


if __name__ == "__main__":
    unittest.main()
