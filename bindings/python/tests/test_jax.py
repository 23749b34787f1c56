# SPDX-License-Identifier: Apache-2.0
"""flashattn.jax against JAX's own attention, and JAX arrays as inputs of the package's functions.

FLASHATTN_TEST_JAX=cuda runs them on a GPU, which needs the extension.
"""

import os
import unittest

PLATFORM = os.environ.get("FLASHATTN_TEST_JAX", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise unittest.SkipTest("JAX is not installed") from error

jax.config.update("jax_platforms", PLATFORM)
jax.config.update("jax_default_matmul_precision", "highest")  # a GPU multiplies fp32 as TF32 unless told otherwise

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flashattn
from flashattn.jax import dot_product_attention, extension


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

    def test_through_the_extension_where_it_is_there(self):
        program = str(jax.make_jaxpr(dot_product_attention)(Q, K, V))
        self.assertEqual("ffi_call" in program, bool(extension), extension.reason)
        self.assertEqual("pure_callback" in program, not extension)

    def test_lengths(self):
        rows, keys = jnp.array([7, 19]), jnp.array([19, 4])
        for options in ({}, {"is_causal": True}):
            ours = lambda q, k, v: dot_product_attention(q, k, v, query_seq_lengths=rows, key_value_seq_lengths=keys, **options)
            used = (jnp.arange(19)[None] < rows[:, None])[..., None, None]
            mask = (jnp.arange(19) < keys[:, None])[:, None, None]
            theirs = lambda q, k, v: jnp.where(used, jax.nn.dot_product_attention(q, k, v, mask=mask, **options), 0)
            self.assert_same(ours, theirs, Q, K, V)

    def test_a_row_that_sees_no_key_gives_zero(self):
        mask = jnp.ones((1, 1, 19, 19), bool).at[..., 3, :].set(False)
        out = dot_product_attention(Q, K, V, mask=mask)
        self.assertFalse(np.any(out[:, 3]))
        self.assertTrue(np.all(np.isfinite(out)))

    def test_mapped(self):
        """Values and gradients of each sample, whatever is mapped, beside a loop over the samples."""
        many_q, many_v = normal(21, 3, 2, 19, 4, 16), normal(22, 3, 2, 19, 2, 16)
        wide, narrow, sinks = normal(23, 3, 2, 4, 19, 19), normal(24, 3, 1, 4, 19, 19), normal(25, 3, 4)
        one = normal(26, 1, 4, 19, 19)
        mask = normal(27, 2, 1, 19, 19) > -1
        lengths = jnp.array([[3, 19], [19, 8], [1, 1]])
        cases = {
            "q and v": (dot_product_attention, (0, None, 0), (many_q, K, many_v)),
            "bias of each sequence": (dot_product_attention, (0, None, 0, 0), (many_q, K, many_v, wide)),
            "bias of each sample": (dot_product_attention, (0, None, 0, 0), (many_q, K, many_v, narrow)),
            "one bias for all": (dot_product_attention, (0, None, 0, None), (many_q, K, many_v, one)),
            "sinks": (
                lambda q, k, v, sink: dot_product_attention(q, k, v, sink=sink),
                (0, None, 0, 0),
                (many_q, K, many_v, sinks),
            ),
            "mask": (lambda q, k, v: dot_product_attention(q, k, v, mask=mask), (0, None, 0), (many_q, K, many_v)),
            "lengths": (
                lambda q, k, v, n: dot_product_attention(q, k, v, key_value_seq_lengths=n),
                (0, None, None, 0),
                (many_q, K, V, lengths),
            ),
        }
        for name, (function, axes, arguments) in cases.items():
            with self.subTest(name):
                floating = tuple(n for n, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating))
                gradient = jax.grad(lambda *a: (function(*a) ** 2).sum(), floating)
                samples = [[x if axis is None else x[n] for x, axis in zip(arguments, axes)] for n in range(3)]
                for got, sample in zip(jax.vmap(function, axes)(*arguments), samples):
                    np.testing.assert_allclose(got, function(*sample), rtol=1e-5, atol=1e-5)
                for n, sample in enumerate(samples):
                    for got, expected in zip(jax.vmap(gradient, axes)(*arguments), gradient(*sample)):
                        np.testing.assert_allclose(got[n], expected, rtol=1e-4, atol=1e-4)

    @unittest.skipIf(len(jax.devices()) < 4, "fewer than four devices")
    def test_over_devices(self):
        """Batch and heads over a mesh: nothing but gradients that all devices share travels. Rows over a mesh: the same values."""
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
        bias, sink = normal(31, 1, 4, 19, 19), normal(32, 4)

        def loss(q, k, v, bias, sink):
            return (dot_product_attention(q, k, v, bias, sink=sink, is_causal=True) ** 2).sum()

        operations = {
            "out": lambda *a: dot_product_attention(*a[:4], sink=a[4], is_causal=True),
            "gradients": jax.grad(loss, (0, 1, 2, 3, 4)),
        }
        by_head = PartitionSpec("data", None, "model")
        specs = (by_head, by_head, by_head, PartitionSpec(None, "model"), PartitionSpec("model"))
        arguments = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((Q, K, V, bias, sink), specs)]
        if not extension:
            with self.assertRaisesRegex(Exception, "several devices needs the extension, and FLASHATTN_JAX_EXTENSION is 0"):
                jax.jit(operations["out"]).lower(*arguments).compile()
            return
        for name, operation in operations.items():
            compiled = jax.jit(operation).lower(*arguments).compile()
            self.assertNotIn("all-gather", compiled.as_text(), name)
            got = jax.tree.leaves(compiled(*arguments))
            for x, y in zip(got, jax.tree.leaves(operation(Q, K, V, bias, sink))):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
            self.assertEqual(tuple(got[0].sharding.spec)[:3], tuple(by_head))
        rows = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "data"))) for x in (Q[:, :18], K[:, :18], V[:, :18])]
        got = jax.jit(dot_product_attention)(*rows)
        np.testing.assert_allclose(got, dot_product_attention(Q[:, :18], K[:, :18], V[:, :18]), rtol=1e-5, atol=1e-5)

    @unittest.skipIf(len(jax.devices()) < 4 or not extension, "fewer than four devices, or no extension")
    def test_a_kv_head_is_not_divided(self):
        mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
        q = jax.device_put(Q, NamedSharding(mesh, PartitionSpec(None, None, "model")))  # four query heads of two KV heads
        got = jax.jit(dot_product_attention)(q, K, V)
        np.testing.assert_allclose(got, dot_product_attention(Q, K, V), rtol=1e-5, atol=1e-5)

    def test_bfloat16(self):
        q, k, v = (x.astype(jnp.bfloat16) for x in (Q, K, V))
        out = dot_product_attention(q, k, v)
        self.assertEqual(out.dtype, jnp.bfloat16)
        expected = jax.nn.dot_product_attention(Q, K, V)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=3e-2, atol=3e-2)

    @unittest.skipIf(PLATFORM != "cpu", "arrays are in host memory")
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
        with self.assertRaisesRegex(ValueError, "no lengths"):
            dot_product_attention(Q, K, V, local_window_size=2, key_value_seq_lengths=jnp.array([3, 4]))
        with self.assertRaisesRegex(Exception, "FA_ERROR_SHAPE"):
            jax.block_until_ready(dot_product_attention(Q, K[..., :8], V))


if __name__ == "__main__":
    unittest.main()
