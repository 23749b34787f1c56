# SPDX-License-Identifier: Apache-2.0
"""Score functions in Python and compiled ones, against the options that do the same."""

import ctypes
import math
import unittest

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest("NumPy is not installed") from error

import flashattn
from flashattn import _abi


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class ScoreTest(unittest.TestCase):
    def setUp(self):
        self.context = flashattn.Context("cpu", threads=2)
        self.q, self.k, self.v, self.dout = normal(1, 2, 9, 4, 8), normal(2, 2, 12, 2, 8), normal(3, 2, 12, 2, 8), normal(4, 2, 9, 4, 8)

    def tearDown(self):
        self.context.close()

    def both(self, **options):
        out, lse = self.context.forward(self.q, self.k, self.v, **options)
        gradients = self.context.backward(self.dout, self.q, self.k, self.v, out, lse, **options)
        return [out, lse, gradients.dq, gradients.dk, gradients.dv]

    def assert_same(self, some, others):
        for x, y in zip(some, others):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)

    def test_softcap(self):
        function = self.context.score(lambda s, p: 3 * math.tanh(s / 3), lambda s, p: 1 - math.tanh(s / 3) ** 2)
        self.assert_same(self.both(score=function), self.both(softcap=3.0))

    def test_masks(self):
        seen = set()

        def visible(p):
            seen.add((p.b, p.h, p.i, p.j, p.s_q, p.s_k))
            return p.j <= p.i + p.s_k - p.s_q

        def tile(p, queries, keys):
            return 1 if p.j > p.i + queries - 1 + p.s_k - p.s_q else 0

        with self.context.score(visible=visible, tile=tile) as function:
            self.assert_same(self.both(score=function), self.both(causal=True))
        self.assertEqual(len(seen), 2 * 4 * 9 * 12)
        self.assertEqual({key[4:] for key in seen}, {(9, 12)})
        with self.assertRaisesRegex(ValueError, "closed"):
            self.both(score=function)

    # Functions that a compiler made get tensors and numbers by the struct that flashattn.h describes.
    def test_compiled_functions_and_tensors(self):
        slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)

        def alibi(s, p, aux):
            tensor = ctypes.cast(aux.contents.tensors, ctypes.POINTER(_abi.fa_tensor))[0]
            slope = ctypes.cast(tensor.data, ctypes.POINTER(ctypes.c_float))[p.contents.h * tensor.stride[1]]
            return s + aux.contents.scalars[2] * slope * abs(p.contents.i + p.contents.s_k - p.contents.s_q - p.contents.j)

        score = _abi.SCORE_FN(alibi)
        derivative = _abi.SCORE_FN(lambda s, p, aux: 1.0)
        function = self.context.score(*(ctypes.cast(f, ctypes.c_void_p).value for f in (score, derivative)))
        tensors = [(slopes.reshape(1, 4, 1, 1), "h")]
        self.assert_same(
            self.both(score=function, score_tensors=tensors, score_scalars=(0, 0, -1.0)), self.both(alibi_slopes=slopes)
        )
        with self.assertRaisesRegex(flashattn.Error, r"score_tensors\[0\].tensor.shape\[1\]"):
            self.both(score=function, score_tensors=[(slopes[:3].reshape(1, 3, 1, 1), "h")])
        with self.assertRaisesRegex(ValueError, "bhij"):
            self.both(score=function, score_tensors=[(slopes, "x")])
        with self.assertRaisesRegex(flashattn.Error, "score is NULL"):
            self.both(score_scalars=(1.0,))
        with self.assertRaisesRegex(ValueError, "up to 8"):
            self.both(score=function, score_scalars=range(9))

    def test_refusals(self):
        with self.assertRaisesRegex(flashattn.Error, "neither"):
            self.context.score()
        with self.assertRaisesRegex(flashattn.Error, "does not run text"):
            self.context.score(text="template <class real> real score(real s) { return s; }")
        function = self.context.score(lambda s, p: s)
        out, lse = self.context.forward(self.q, self.k, self.v, score=function)
        with self.assertRaisesRegex(flashattn.Error, "derivative"):
            self.context.backward(self.dout, self.q, self.k, self.v, out, lse, score=function)
        with self.assertRaisesRegex(flashattn.Error, "another context"):
            flashattn.forward(self.q, self.k, self.v, score=function)

    def test_exceptions_reach_the_caller(self):
        def fails(s, p):
            raise KeyError("not today")

        function = self.context.score(fails)
        for _ in range(2):
            with self.assertRaisesRegex(KeyError, "not today"):
                self.context.forward(self.q, self.k, self.v, score=function)
        self.context.forward(self.q, self.k, self.v)

    def test_the_functions_of_the_module(self):
        with flashattn.score(visible=lambda p: p.i == p.j) as function:
            out, _ = flashattn.forward(self.q, self.k[:, :9], self.v[:, :9], score=function)
        np.testing.assert_allclose(out, np.repeat(self.v[:, :9], 2, axis=2), rtol=1e-6)


if __name__ == "__main__":
    unittest.main()
