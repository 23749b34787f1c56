# SPDX-License-Identifier: Apache-2.0
"""flashattn.vllm through the interface classes of vLLM itself: what it tells the selection, the cache it writes, attention over that cache next to
float64. test_vllm_engine runs the backend in vLLM's engine.
"""

import importlib
import os
import sys
import types
import unittest
from unittest import mock

from tests.torch_cases import TorchCase, reference

import torch

try:
    import vllm
except ImportError as error:
    raise unittest.SkipTest("vLLM is not installed") from error
if not vllm.__version__.startswith("0.33."):
    raise unittest.SkipTest(f"vLLM 0.33 is not installed, but {vllm.__version__}")

from vllm.config import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

import flashattn.vllm

H200 = DeviceCapability(9, 0)


class SelectionTest(unittest.TestCase):
    def test_registered_twice_it_is_there_once(self):
        flashattn.vllm.register()
        flashattn.vllm.register()
        member = AttentionConfig(backend="fa_c").backend
        self.assertIs(member, AttentionBackendEnum["FA_C"])
        self.assertIs(member.get_class(), flashattn.vllm.Backend)
        self.assertEqual(member.get_class().get_name(), member.name)

    def test_another_version_of_vllm_is_refused_when_the_plugin_is_loaded(self):
        with mock.patch.object(vllm, "__version__", "0.34.1"), mock.patch.dict(sys.modules):
            del sys.modules["flashattn.vllm"]
            with self.assertRaisesRegex(ImportError, "vLLM 0.34.1 is installed; .* is for vLLM 0.33"):
                importlib.import_module("flashattn.vllm")

    def reasons(self, **given):
        asked = dict(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True, use_sparse=False,
            use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=H200, attn_type=AttentionType.DECODER, has_sliding_window=True,
        )  # fmt: skip
        return flashattn.vllm.Backend.validate_configuration(**{**asked, **given})

    def test_what_is_served(self):
        for given in (
            {},
            dict(head_size=80, dtype=torch.float16, kv_cache_dtype="float16"),
            dict(head_size=512, block_size=1),
            dict(use_non_causal=True),
            dict(dtype=torch.float32),
            dict(kv_cache_dtype="fp8", use_per_head_quant_scales=True),
            dict(kv_cache_dtype="fp8_e4m3", head_size=256),
        ):
            self.assertEqual(self.reasons(**given), [], given)

    def test_what_is_refused_and_why(self):
        for given, reason in (
            (dict(head_size=576), "head_size"),
            (dict(dtype=torch.float64), "dtype"),
            (dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype"),
            (dict(use_mla=True), "MLA"),
            (dict(use_mm_prefix=True), "multimodal"),
            (dict(attn_type=AttentionType.ENCODER_ONLY), "ENCODER_ONLY"),
            (dict(device_capability=DeviceCapability(7, 5)), "compute capability"),
            (dict(use_dcp=True), "DCP"),
        ):
            self.assertRegex("; ".join(self.reasons(**given)), f"^[^;]*{reason}[^;]*$", given)

    def test_batch_invariance(self):
        fp8, a100 = dict(kv_cache_dtype="fp8"), DeviceCapability(8, 0)
        with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"):
            for given in ({}, dict(head_size=256), fp8, dict(device_capability=a100), dict(dtype=torch.float32, head_size=300, device_capability=None)):
                self.assertEqual(self.reasons(use_batch_invariant=True, **given), [], given)
            for given, reason in (
                (dict(dtype=torch.float32), "batch invariance is for fp16 and bf16"),
                (dict(head_size=512), "head sizes up to 256"),
                (dict(head_size=68), "multiples of 8"),
                (dict(fp8, head_size=72), "multiples of 16"),
                (dict(fp8, head_size=256), "head sizes up to 128"),
                (dict(fp8, device_capability=a100), "fp8 caches is for Hopper"),
            ):
                self.assertRegex("; ".join(self.reasons(use_batch_invariant=True, **given)), reason)


class BatchTest(TorchCase):
    """Requests with random numbers of new and of earlier tokens, in blocks of a cache whose other rows are NaN."""

    HEADS, KEY_HEADS, DIM = 4, 2, 32

    def spec(self, size, dtype):
        return FullAttentionSpec(block_size=size, num_kv_heads=self.KEY_HEADS, head_size=self.DIM, dtype=dtype)

    def integers(self, low, high, n):
        return torch.randint(low, high, (n,), generator=self.generator)

    def common(self, new, earlier, table, slots, padding, **given):
        starts = torch.cat([torch.zeros(1, dtype=torch.long), new.cumsum(0)]).to(torch.int32)
        lengths = (new + earlier).to(torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(new), num_actual_tokens=int(starts[-1]) + padding,
            max_query_len=int(new.max()), max_seq_len=int(lengths.max()) + 3, block_table_tensor=table, slot_mapping=slots, **given,
        )  # fmt: skip

    def run_batch(self, dtype=torch.float32, size=16, by_rows=False, sink=False, padding=0, causal=True, decode=False, slopes=None, fp8=None, **options):
        """fp8: scales of keys and values, (1,) or one for each head, of a fp8 cache. vLLM keeps such a cache in bytes."""
        requests = 5
        new = torch.ones(requests, dtype=torch.long) if decode else self.integers(1, 40, requests)
        earlier = self.integers(0, 70, requests)
        width = int(-(-(new + earlier).max() // size)) + 1
        table = torch.randperm(requests * width + 1, generator=self.generator)[: requests * width].view(requests, width).to(torch.int32)
        shape = (requests * width + 1, self.KEY_HEADS, size, 2 * self.DIM)
        nan, kept = (torch.nan, dtype) if fp8 is None else (0x7F, torch.uint8)
        if by_rows:  # in memory a block has rows of all heads
            cache = torch.full((shape[0], size, self.KEY_HEADS, shape[3]), nan, dtype=kept).transpose(1, 2)
        else:
            cache = torch.full(shape, nan, dtype=kept)
        keys, values = ([self.normal(int(n), self.KEY_HEADS, self.DIM, dtype=dtype, grad=False) for n in new + earlier] for _ in range(2))

        def slots_of(request, rows):
            return table[request, rows // size].long() * size + rows % size

        sinks = self.normal(self.HEADS, dtype=dtype, grad=False) if sink else None
        scales = fp8 or (torch.ones(1), torch.ones(1))
        layer = types.SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
        if fp8 is not None:  # numbers that the cache holds as they are
            keys, values = (
                [(x / scale.view(-1, 1)).to(torch.float8_e4m3fn).float() * scale.view(-1, 1) for x in numbers]
                for numbers, scale in zip((keys, values), scales)
            )
        backend = flashattn.vllm.Backend
        implementation = backend.get_impl_cls()(
            self.HEADS, self.DIM, 0.3, self.KEY_HEADS, slopes, options.get("sliding_window"), "auto" if fp8 is None else "fp8",
            options.get("logits_soft_cap"), sinks=sinks
        )  # fmt: skip
        implementation.process_weights_after_loading(dtype)
        for first, last in ((0 * earlier, earlier), (earlier, earlier + new)):  # earlier steps, then this one
            rows = [torch.arange(int(a), int(b)) for a, b in zip(first, last)]
            slots = torch.cat([slots_of(n, r) for n, r in enumerate(rows)] + [torch.full((padding,), -1)])
            key, value = (
                torch.cat([x[n][r] for n, r in enumerate(rows)] + [torch.full((padding, self.KEY_HEADS, self.DIM), 7, dtype=keys[0].dtype)])
                for x in (keys, values)
            )
            implementation.do_kv_cache_update(layer, key, value, cache, slots)
        written = ~cache.isnan() if fp8 is None else cache != nan
        self.assertEqual(int(written.sum()), int((new + earlier).sum()) * 2 * self.KEY_HEADS * self.DIM)

        builder = backend.get_builder_cls()(self.spec(size, dtype), ["layer"], None, torch.device("cpu"))
        metadata = builder.build(0, self.common(new, earlier, table, slots, padding, causal=causal))
        query = self.normal(int(new.sum()) + padding, self.HEADS, self.DIM, dtype=dtype, grad=False)
        output = torch.full_like(query, torch.nan)
        self.assertIs(implementation.forward(layer, query, key, value, cache, metadata, output), output)
        self.assertEqual(int(output.isnan().sum()), padding * self.HEADS * self.DIM)  # rows of nobody stay as they are

        start = 0
        for n, (rows, before) in enumerate(zip(new.tolist(), earlier.tolist())):
            distance = torch.arange(rows + before) - torch.arange(rows).view(-1, 1) - before
            visible = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
            if "sliding_window" in options:
                visible = visible & (distance > -options["sliding_window"]) & (distance <= 0)
            bias = None if slopes is None else torch.tensor(slopes).view(1, -1, 1, 1) * -distance.abs()
            expected, _ = reference(
                query[None, start : start + rows], keys[n][None], values[n][None], visible, scale=0.3, bias=bias, sink=sinks,
                softcap=options.get("logits_soft_cap"),
            )  # fmt: skip
            self.assert_same(output[None, start : start + rows], expected)
            start += rows

    def test_prefill_and_decode_in_one_batch(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for by_rows in (False, True):
                with self.subTest(dtype=dtype, by_rows=by_rows):
                    self.run_batch(dtype, by_rows=by_rows)

    def test_decode(self):
        for size in (1, 7, 16):
            with self.subTest(size=size):
                self.run_batch(torch.bfloat16, size=size, decode=True)

    def test_fp8_cache(self):
        of_tensor, of_heads = (torch.tensor(0.25), torch.tensor([2.0])), (torch.tensor([0.5, 3.0]), torch.tensor([0.0625, 1.0]))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for scales in (of_tensor, of_heads):
                for decode in (False, True):
                    with self.subTest(dtype=dtype, scales=scales, decode=decode):
                        self.run_batch(dtype, fp8=scales, decode=decode, by_rows=decode, padding=3, sink=decode)

    def test_fp8_numbers_are_rounded_to_the_nearest_and_saturated(self):
        implementation = flashattn.vllm.Implementation(2, 4, 1.0, kv_cache_dtype="fp8_e4m3")
        cache = torch.zeros(2, 2, 3, 8, dtype=torch.uint8)
        layer = types.SimpleNamespace(_k_scale=torch.tensor([0.5, 1.0]), _v_scale=torch.tensor(2.0))
        key = torch.tensor([1e4, -1e4, 1.07, torch.nan]).expand(1, 2, 4)
        implementation.do_kv_cache_update(layer, key, key, cache, torch.tensor([4]))
        keys, values = (x.view(torch.float8_e4m3fn).float()[1, 1] for x in implementation._caches(cache))
        expected = torch.tensor([[448, -448, 2.25, torch.nan], [448, -448, 1.125, torch.nan]])
        torch.testing.assert_close(keys, expected, equal_nan=True)
        torch.testing.assert_close(values, torch.tensor([448, -448, 0.5625, torch.nan]).expand(2, 4), equal_nan=True)

    def outputs(self, requests, dtype, size=16):
        """Of requests in one batch. Each is the queries of its last tokens, and the keys and values of all."""
        width = max(len(keys) for _, keys, _ in requests) // size + 1
        table = torch.randperm(len(requests) * width, generator=self.generator).view(-1, width).to(torch.int32)
        cache = torch.full((len(requests) * width, self.KEY_HEADS, size, 2 * self.DIM), torch.nan, dtype=dtype)
        implementation = flashattn.vllm.Implementation(self.HEADS, self.DIM, 0.3, self.KEY_HEADS)
        for pages, (_, keys, values) in zip(table, requests):
            rows = torch.arange(len(keys))
            implementation.do_kv_cache_update(None, keys, values, cache, pages[rows // size].long() * size + rows % size)
        new, all_tokens = (torch.tensor([len(x[n]) for x in requests]) for n in (0, 1))
        builder = flashattn.vllm.Builder(self.spec(size, dtype), ["layer"], None, torch.device("cpu"))
        metadata = builder.build(0, self.common(new, all_tokens - new, table, new, 0, causal=True))
        query = torch.cat([queries for queries, _, _ in requests])
        output = implementation.forward(None, query, query, query, cache, metadata, torch.full_like(query, torch.nan))
        return output.split(new.tolist())

    def test_bits_depend_on_the_request_alone(self):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype), mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"):

                def request(new, tokens):
                    shapes = ((new, self.HEADS), (tokens, self.KEY_HEADS), (tokens, self.KEY_HEADS))
                    return [self.normal(*shape, self.DIM, dtype=dtype, grad=False) for shape in shapes]

                mine, decode, prefill = request(60, 1500), request(1, 2100), request(200, 300)
                queries, keys, values = mine
                (alone,) = self.outputs([mine], dtype)
                among = self.outputs([decode, mine, prefill, decode], dtype)[1]
                self.assertTrue(torch.equal(alone, among))
                parts = []
                for begin, end, others in ((0, 13, []), (13, 14, [prefill]), (14, 60, [decode])):
                    last = 1440 + end
                    parts.append(self.outputs([(queries[begin:end], keys[:last], values[:last]), *others], dtype)[0])
                self.assertTrue(torch.equal(alone, torch.cat(parts)))

    def test_padded_tokens(self):
        self.run_batch(padding=9)

    def test_options(self):
        for options in (
            dict(sliding_window=1),
            dict(sliding_window=13),
            dict(sliding_window=13, causal=False),
            dict(logits_soft_cap=1.5),
            dict(sink=True),
            dict(slopes=[0.5, 0.25, 0.125, 0.0625]),
            dict(causal=False),
            dict(sink=True, sliding_window=20, logits_soft_cap=2.0, dtype=torch.bfloat16),
        ):
            with self.subTest(**options):
                self.run_batch(**options)

    def test_memory_is_measured_without_a_batch(self):
        implementation = flashattn.vllm.Implementation(self.HEADS, self.DIM, 1.0)
        output = torch.full((3, self.HEADS, self.DIM), torch.nan)
        implementation.forward(None, output, output, output, torch.empty(0), None, output)
        self.assertEqual(output.abs().sum(), 0)

    def test_on_a_gpu_vllm_writes_the_cache(self):
        from vllm import _custom_ops

        keys, values = torch.empty(2, 16, 2, 8), torch.empty(2, 16, 2, 8)
        cache = mock.MagicMock(is_cuda=True)
        cache.transpose.return_value.split.return_value = (keys, values)
        layer = types.SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
        key, value, slots = torch.empty(3, 2, 8), torch.empty(3, 2, 8), torch.arange(3)
        with mock.patch.object(_custom_ops, "reshape_and_cache_flash", autospec=True) as write:
            flashattn.vllm.Implementation(2, 8, 1.0).do_kv_cache_update(layer, key, value, cache, slots)
        write.assert_called_once_with(key, value, keys, values, slots, "auto", layer._k_scale, layer._v_scale)

    def test_refusals_name_the_argument(self):
        for given, words in (
            (dict(attn_type=AttentionType.ENCODER), "attn_type is .*ENCODER"),
            (dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype is fp8_e5m2"),
        ):
            with self.assertRaisesRegex(NotImplementedError, words):
                flashattn.vllm.Implementation(self.HEADS, self.DIM, 1.0, **given)
        implementation = flashattn.vllm.Implementation(self.HEADS, self.DIM, 1.0)
        for name in ("output_scale", "output_block_scale"):
            with self.assertRaisesRegex(NotImplementedError, name):
                implementation.forward(None, *[torch.empty(0)] * 4, None, torch.empty(0), **{name: torch.ones(1)})
        builder = flashattn.vllm.Builder(self.spec(16, torch.float32), ["layer"], None, torch.device("cpu"))
        one = torch.ones(1, dtype=torch.long)
        for name, value in (("causal", torch.ones(1, dtype=torch.bool)), ("mm_req_doc_ranges", {0: [(0, 1)]}), ("rswa_prefix_lens", one)):
            with self.assertRaisesRegex(NotImplementedError, name):
                builder.build(0, self.common(one, one, one.view(1, 1).int(), one, 0, **{name: value}))


if __name__ == "__main__":
    unittest.main()
