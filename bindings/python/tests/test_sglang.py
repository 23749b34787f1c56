# SPDX-License-Identifier: Apache-2.0
"""flashattn.sglang through the classes of SGLang itself: its layer, its batch and its memory pools, next to float64. test_sglang_engine runs the
backend in SGLang's engine.
"""

import argparse
import importlib
import sys
import types
import unittest
from unittest import mock

from tests.torch_cases import TorchCase, reference

import torch

try:
    import sglang
except ImportError as error:
    raise unittest.SkipTest("SGLang is not installed") from error
if sglang.__version__ != "0.5.23":
    raise unittest.SkipTest(f"SGLang 0.5.23 is not installed, but {sglang.__version__}")

try:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    )
    import sglang.srt.model_executor.runner  # the memory pool imports it late
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.server_args import ServerArgs
except ImportError as error:  # it needs more packages than pip can install without a GPU
    raise unittest.SkipTest(f"SGLang is not installed as a whole: {error}") from error

import flashattn.sglang


class RegistryTest(unittest.TestCase):
    def test_registered_twice_it_is_there_once(self):
        flashattn.sglang.register()
        flashattn.sglang.register()
        for choices in (ATTENTION_BACKEND_CHOICES, DETERMINISTIC_ATTENTION_BACKEND_CHOICES, RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND):
            self.assertEqual(choices.count("fa_c"), 1)
        self.assertIs(ATTENTION_BACKENDS["fa_c"], flashattn.sglang.Backend)

    def test_sglang_takes_its_name(self):
        flashattn.sglang.register()
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        self.assertEqual(parser.parse_args(["--model-path", "MODEL", "--attention-backend", "fa_c"]).attention_backend, "fa_c")

    def test_another_version_of_sglang_is_refused_when_the_plugin_is_loaded(self):
        with mock.patch.object(sglang, "__version__", "0.5.24"), mock.patch.dict(sys.modules):
            del sys.modules["flashattn.sglang"]
            with self.assertRaisesRegex(ImportError, "SGLang 0.5.24 is installed; .* is for SGLang 0.5.23"):
                importlib.import_module("flashattn.sglang")


class BatchTest(TorchCase):
    """Requests with random numbers of new and of earlier tokens, in pages of a cache whose other rows are NaN."""

    HEADS, KEY_HEADS, DIM, CONTEXT = 4, 2, 32, 160

    def setUp(self):
        super().setUp()
        self.execution = types.SimpleNamespace(deterministic=types.SimpleNamespace(enable_deterministic_inference=False))
        patch = mock.patch.object(flashattn.sglang, "get_exec", lambda: self.execution)  # SGLang publishes it when it starts
        patch.start()
        self.addCleanup(patch.stop)

    def integers(self, low, high, n):
        return torch.randint(low, high, (n,), generator=self.generator)

    def pools(self, requests, page_size, dtype, value_dim):
        width = -(-self.CONTEXT // page_size)
        pool = MHATokenToKVPool(
            requests * width * page_size, page_size, dtype, self.KEY_HEADS, self.DIM, 1, "cpu", False, v_head_dim=value_dim
        )  # fmt: skip
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(torch.nan if buffer.dtype is not torch.uint8 else 0x7F)  # SGLang keeps fp8 in bytes
        table = ReqToTokenPool(requests, self.CONTEXT, "cpu", False)
        # Page 0 is for padding.
        pages = 1 + torch.randperm(requests * width, generator=self.generator).view(requests, width)
        rows = (pages[:, :, None] * page_size + torch.arange(page_size)).view(requests, -1)[:, : self.CONTEXT]
        table.req_to_token[1:] = rows.to(torch.int32)
        return pool, table

    def runner(self, pool, table, **given):
        return types.SimpleNamespace(**{**dict(token_to_kv_pool=pool, req_to_token_pool=table, use_mla_backend=False, device="cpu"), **given})

    def batch(self, table, new, earlier, decode):
        indices = torch.arange(1, len(new) + 1)
        slots = torch.cat([table.req_to_token[n, int(a) : int(a + b)] for n, a, b in zip(indices, earlier, new)]).long()
        lengths = new + earlier
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND, batch_size=len(new), input_ids=torch.zeros(int(new.sum()), dtype=torch.long),
            req_pool_indices=indices, seq_lens=lengths, out_cache_loc=slots, seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths.clone(),
        )  # fmt: skip
        if not decode:
            batch.extend_num_tokens = int(new.sum())
            batch.extend_seq_lens, batch.extend_prefix_lens = new.to(torch.int32), earlier.to(torch.int32)
            batch.extend_seq_lens_cpu = new.tolist()
        return batch

    def run_batch(self, dtype=torch.float32, page_size=1, sink=False, decode=False, native=False, graph=False, value_dim=None, fp8=None, **options):
        """fp8: scales of keys and values of a fp8 cache, or (None, None)."""
        requests = 5
        value_dim = value_dim or self.DIM
        new = torch.ones(requests, dtype=torch.long) if decode else self.integers(1, 40, requests)
        earlier = self.integers(1, 90, requests)
        pool, table = self.pools(requests, page_size, dtype if fp8 is None else torch.float8_e4m3fn, value_dim)
        layer = RadixAttention(self.HEADS, self.DIM, 0.3, self.KEY_HEADS, 0, v_head_dim=value_dim, **options)
        keys = [self.normal(int(n), self.KEY_HEADS, self.DIM, dtype=dtype, grad=False) for n in new + earlier]
        values = [self.normal(int(n), self.KEY_HEADS, value_dim, dtype=dtype, grad=False) for n in new + earlier]
        if fp8 is not None:
            layer.k_scale, layer.v_scale = (None if scale is None else torch.nn.Parameter(torch.tensor(scale), requires_grad=False) for scale in fp8)
            # Numbers that the cache holds as they are.
            keys, values = (
                [((x / (scale or 1)).to(torch.float8_e4m3fn).float() * (scale or 1)).to(dtype) for x in numbers]
                for numbers, scale in zip((keys, values), fp8)
            )
        sinks = self.normal(self.HEADS, dtype=dtype, grad=False) if sink else None
        backend = flashattn.sglang.Backend(self.runner(pool, table))

        def step(backend, first, last, decode, prepare):
            batch = self.batch(table, last - first, first, decode)
            query = self.normal(int((last - first).sum()), self.HEADS * self.DIM, dtype=dtype, grad=False)
            key, value = (torch.cat([x[n][int(a) : int(b)] for n, (a, b) in enumerate(zip(first, last))]).flatten(1) for x in (keys, values))
            prepare(batch)
            with forward_context(ForwardContext(attn_backend=backend)):
                return query, layer(query, key, value, batch, **({} if sinks is None else {"sinks": sinks}))

        step(backend, 0 * earlier, earlier, False, backend.init_forward_metadata)
        if graph:
            backend.init_cuda_graph_state(requests + 2, requests + 2)
            one = torch.ones(requests, dtype=torch.long)
            backend.init_forward_metadata_out_graph(self.batch(table, one, one, True), in_capture=True)
            captured = backend.forward_metadata
            query, output = step(backend, earlier, earlier + new, decode, backend.init_forward_metadata_out_graph)
            for name in ("seq_lens", "page_table"):  # a graph reads where it was captured
                self.assertEqual(getattr(captured, name).data_ptr(), getattr(backend.forward_metadata, name).data_ptr())
            self.assertEqual((captured.max_seq_len, captured.max_query_len), (self.CONTEXT, 1))
        else:
            query, output = step(backend, earlier, earlier + new, decode, backend.init_forward_metadata)
        self.assertEqual(output.shape, (int(new.sum()), self.HEADS * value_dim))
        written = ~pool.k_buffer[0].isnan() if fp8 is None else pool.k_buffer[0] != 0x7F
        self.assertEqual(int(written.sum()), int((new + earlier).sum()) * self.KEY_HEADS * self.DIM)

        query, output = query.view(-1, self.HEADS, self.DIM), output.view(-1, self.HEADS, value_dim)
        start = 0
        for n, (rows, before) in enumerate(zip(new.tolist(), earlier.tolist())):
            distance = torch.arange(rows + before) - torch.arange(rows).view(-1, 1) - before
            visible = distance <= 0
            if options.get("sliding_window_size", -1) > 0:
                visible = visible & (distance >= -options["sliding_window_size"])
            expected, _ = reference(
                query[None, start : start + rows], keys[n][None], values[n][None], visible, scale=0.3, sink=sinks,
                softcap=options.get("logit_cap"),
            )  # fmt: skip
            self.assert_same(output[None, start : start + rows], expected)
            start += rows

        if native:  # SGLang's own attention on the CPU, over the cache that is written by now
            theirs = TorchNativeAttnBackend(self.runner(pool, table))
            batch = self.batch(table, new, earlier, decode)
            theirs.init_forward_metadata(batch)
            forward = theirs.forward_decode if decode else theirs.forward_extend
            expected = forward(query.flatten(1), None, None, layer, batch, save_kv_cache=False)
            self.assert_same(output, expected.view_as(output))

    def test_prefill_after_a_prefix(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for page_size in (1, 16):
                with self.subTest(dtype=dtype, page_size=page_size):
                    self.run_batch(dtype, page_size, native=True)

    def test_decode(self):
        for dtype in (torch.float32, torch.bfloat16):
            for page_size in (1, 7, 64):
                with self.subTest(dtype=dtype, page_size=page_size):
                    self.run_batch(dtype, page_size, decode=True, native=True)

    def test_decode_as_in_a_graph(self):
        for page_size in (1, 16):
            with self.subTest(page_size=page_size):
                self.run_batch(torch.bfloat16, page_size, decode=True, graph=True)

    def test_fp8_cache(self):
        for dtype in (torch.bfloat16, torch.float32):
            for scales in ((None, None), (0.25, 2.0)):
                for decode in (False, True):
                    with self.subTest(dtype=dtype, scales=scales, decode=decode):
                        self.run_batch(dtype, 16 if decode else 1, decode=decode, fp8=scales, sink=decode)
        self.run_batch(torch.bfloat16, 16, decode=True, graph=True, fp8=(0.5, 4.0))

    def test_options(self):
        for options in (
            dict(sliding_window_size=1),
            dict(sliding_window_size=13, native=True),
            dict(sliding_window_size=13, decode=True, native=True),
            dict(logit_cap=1.5),
            dict(sink=True),
            dict(value_dim=24, native=True),
            dict(sink=True, sliding_window_size=20, logit_cap=2.0, dtype=torch.bfloat16, decode=True),
        ):
            with self.subTest(**options):
                self.run_batch(**options)

    def test_bits_depend_on_the_request_alone(self):
        self.execution.deterministic.enable_deterministic_inference = True
        self.CONTEXT = 1600
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype):
                pool, table = self.pools(2, 16, dtype, self.DIM)
                backend = flashattn.sglang.Backend(self.runner(pool, table))
                layer = RadixAttention(self.HEADS, self.DIM, 0.3, self.KEY_HEADS, 0)
                lengths = torch.tensor([1500, 1300])
                query, key, value = ([self.normal(int(n), heads * self.DIM, dtype=dtype, grad=False) for n in lengths] for heads in (4, 2, 2))

                def outputs(first, last):
                    batch = self.batch(table, last - first, first, False)
                    backend.init_forward_metadata(batch)
                    q, k, v = (torch.cat([x[n][a:b] for n, (a, b) in enumerate(zip(first.tolist(), last.tolist()))]) for x in (query, key, value))
                    return backend.forward_extend(q, k.view(-1, 2, self.DIM), v.view(-1, 2, self.DIM), layer, batch)[: int(last[0] - first[0])]

                whole = outputs(torch.tensor([0, 0]), lengths)
                edges = torch.tensor([[0, 0], [700, 1], [701, 1200], [1111, 1201], [1500, 1300]])
                parts = torch.cat([outputs(first, last) for first, last in zip(edges[:-1], edges[1:])])
                self.assertTrue(torch.equal(whole, parts))

    def test_rows_of_padding_are_zero(self):
        pool, table = self.pools(2, 1, torch.float32, self.DIM)
        backend = flashattn.sglang.Backend(self.runner(pool, table))
        layer = RadixAttention(self.HEADS, self.DIM, 0.3, self.KEY_HEADS, 0)
        batch = self.batch(table, torch.tensor([3, 2]), torch.tensor([0, 0]), False)
        backend.init_forward_metadata(batch)
        query = self.normal(9, self.HEADS * self.DIM, grad=False)
        key, value = (self.normal(5, self.KEY_HEADS, self.DIM, grad=False) for _ in range(2))
        output = backend.forward_extend(query, key, value, layer, batch)
        self.assertEqual(float(output[5:].abs().sum()), 0)
        self.assertTrue(output[:5].abs().sum() > 0)

    def test_an_idle_rank(self):
        pool, table = self.pools(2, 1, torch.float32, self.DIM)
        backend = flashattn.sglang.Backend(self.runner(pool, table))
        batch = self.batch(table, torch.tensor([1, 1]), torch.tensor([1, 1]), True)
        batch.forward_mode = ForwardMode.IDLE
        backend.init_forward_metadata(batch)
        layer = RadixAttention(self.HEADS, self.DIM, 0.3, self.KEY_HEADS, 0)
        output = backend.forward(torch.empty(0, self.HEADS * self.DIM), None, None, layer, batch)
        self.assertEqual(output.shape, (0, self.HEADS * self.DIM))

    def test_refusals_name_the_argument(self):
        pool, table = self.pools(2, 1, torch.float32, self.DIM)

        def refused(words):
            return self.assertRaisesRegex(NotImplementedError, words)

        for given, words in (
            (dict(use_mla_backend=True), "MLA"),
            (dict(token_to_kv_pool=types.SimpleNamespace()), "KV cache is a SimpleNamespace"),
        ):
            with refused(words):
                flashattn.sglang.Backend(self.runner(pool, table, **given))
        for name, value in (("dtype", torch.float8_e5m2), ("kv_cache_layout", "vectorized_5d")):
            with mock.patch.object(pool, name, value), refused(str(value)):
                flashattn.sglang.Backend(self.runner(pool, table))
        with mock.patch.object(pool, "get_kv_scale_buffer", None, create=True), refused("one scale a layer"):
            flashattn.sglang.Backend(self.runner(pool, table))

        backend = flashattn.sglang.Backend(self.runner(pool, table))
        one = torch.ones(2, dtype=torch.long)
        for name, value in (
            ("forward_mode", ForwardMode.TARGET_VERIFY),
            ("forward_mode", ForwardMode.DLLM_EXTEND),
            ("spec_info", object()),
            ("encoder_lens", one),
            ("multi_item_delimiter_indices", [one]),
            ("attn_cp_metadata", object()),
            ("dcp_kv_mask", one),
            ("mha_return_lse", True),
        ):
            batch = self.batch(table, one, one, False)
            setattr(batch, name, value)
            for prepare in (backend.init_forward_metadata, backend.init_forward_metadata_out_graph):
                with refused(name):
                    prepare(batch)
        with refused("EXTEND; .* graphs of decode alone"):
            backend.init_forward_metadata_out_graph(self.batch(table, one, one, False))
        batch = self.batch(table, one, one, True)
        with refused("after init_cuda_graph_state"):
            backend.init_forward_metadata_out_graph(batch)

        backend.init_forward_metadata(batch)
        query = torch.zeros(2, self.HEADS * self.DIM)
        for given, words in (
            (dict(attn_type=AttentionType.ENCODER_ONLY), "attn_type of the layer is .*ENCODER_ONLY"),
            (dict(is_cross_attention=True), "is_cross_attention"),
            (dict(use_irope=True), "use_irope"),
            (dict(pos_encoding_mode="ROPE"), "pos_encoding_mode of the layer is ROPE"),
            (dict(logit_cap=1.0, logit_capping_method="none"), "logit_capping_method"),
        ):
            layer = RadixAttention(self.HEADS, self.DIM, 1.0, self.KEY_HEADS, 0, **given)
            with refused(words):
                backend.forward(query, None, None, layer, batch)
        layer = RadixAttention(self.HEADS, self.DIM, 1.0, self.KEY_HEADS, 0)
        with refused("q_rope is given"):
            backend.forward(query, None, None, layer, batch, q_rope=query)
        layer.xai_temperature_len = 4
        with refused("xai_temperature_len of the layer is 4"):
            backend.forward(query, None, None, layer, batch)


if __name__ == "__main__":
    unittest.main()
