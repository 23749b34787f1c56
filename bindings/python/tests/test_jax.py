# SPDX-License-Identifier: Apache-2.0
"""flashattn.jax against JAX's own attention, and JAX arrays as inputs of the package's functions."""

import unittest

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise unittest.SkipTest("JAX is not installed") from error

jax.config.update("jax_platforms", "cpu")  # flashattn.jax is for host arrays, and a GPU multiplies fp32 as TF32 unless told otherwise

import numpy as np

import flashattn
from flashattn.jax import dot_product_attention


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.PRNGKey(seed), shape, dtype)


Q, K, V = normal(1, 2, 19, 4, 16), normal(2, 2, 19, 2, 16), normal(3, 2, 19, 2, 16)


class JaxTest(unittest.TestCase):
    def assert_same(self, ours, theirs, *arguments, tolerance=3e-5):
        """Values, and gradients with respect to all arguments, with and without jit."""
        dout = normal(9, *theirs(*arguments).shape)
        numbers = tuple(range(len(arguments)))
        weighted = lambda f: lambda *a: (f(*a) * dout).sum()
        for function in (ours, jax.jit(ours)):
            np.testing.assert_allclose(function(*arguments), theirs(*arguments), rtol=tolerance, atol=tolerance)
            gradients = jax.grad(weighted(function), numbers)(*arguments)
            for got, expected in zip(gradients, jax.grad(weighted(theirs), numbers)(*arguments)):
                np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)

    def test_like_jax(self):
        mask = jax.random.uniform(jax.random.PRNGKey(5), (2, 1, 19, 19)) > 0.3
        mask = mask.at[..., 0].set(True)  # JAX has its own idea of rows that see nothing
        for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"mask": mask}, {"is_causal": True, "local_window_size": 3}):
            with self.subTest(options=list(options)):
                ours = lambda q, k, v: dot_product_attention(q, k, v, **options)
                theirs = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)
                self.assert_same(ours, theirs, Q, K, V)

    def test_bias_has_a_gradient(self):
        bias = normal(4, 1, 4, 19, 19)
        self.assert_same(dot_product_attention, jax.nn.dot_product_attention, Q, K, V, bias)

    def test_one_sequence_and_vmap(self):
        np.testing.assert_allclose(
            dot_product_attention(Q[0], K[0], V[0]), dot_product_attention(Q, K, V)[0], rtol=1e-6, atol=1e-6
        )
        many = jax.vmap(dot_product_attention)(Q[None], K[None], V[None])
        np.testing.assert_allclose(many[0], dot_product_attention(Q, K, V), rtol=1e-6, atol=1e-6)

    def test_lse_and_sink(self):
        def theirs(q, k, v, sink):
            logits = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, 2, 2)) / 4
            extra = jnp.broadcast_to(sink[None, :, None, None], (2, 4, 19, 1))
            return jax.nn.logsumexp(jnp.concatenate([logits, extra], -1), -1)

        ours = lambda q, k, v, sink: dot_product_attention(q, k, v, sink=sink, return_residual=True)[1]
        self.assert_same(ours, theirs, Q, K, V, normal(6, 4))

    def test_bfloat16(self):
        q, k, v = (x.astype(jnp.bfloat16) for x in (Q, K, V))
        out = dot_product_attention(q, k, v)
        self.assertEqual(out.dtype, jnp.bfloat16)
        expected = jax.nn.dot_product_attention(Q, K, V)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=3e-2, atol=3e-2)

    def test_arrays_go_in_as_they_are_and_come_out_for_jax(self):
        out, lse = flashattn.forward(Q, K, V, causal=True)
        np.testing.assert_allclose(jnp.asarray(out), dot_product_attention(Q, K, V, is_causal=True), rtol=1e-6, atol=1e-6)
        own = flashattn.Array(Q.shape, flashattn._abi.FLOAT32)
        flashattn.forward(Q, K, V, out=own, lse=lse)
        taken = jax.dlpack.from_dlpack(own)
        np.testing.assert_allclose(taken, dot_product_attention(Q, K, V), rtol=1e-6, atol=1e-6)

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "local_window_size"):
            dot_product_attention(Q[:, :5], K, V, local_window_size=2)
        with self.assertRaisesRegex(Exception, "FA_ERROR_SHAPE"):
            jax.block_until_ready(dot_product_attention(Q, K[..., :8], V))


if __name__ == "__main__":
    unittest.main()
