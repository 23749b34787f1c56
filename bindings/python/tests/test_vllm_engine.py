# SPDX-License-Identifier: Apache-2.0
"""flashattn.vllm inside vLLM's engine, on the CPU: `LLM(...).generate` on small models with random parameters, next to eager attention of transformers
with the same parameters. The scheduler, the manager of the KV cache, the worker, both model runners and the models are vLLM's own.

vLLM's package has kernels for GPUs alone. Where these are missed, Triton's interpreter runs vLLM's Triton kernels, PyTorch runs its custom operators
(`custom_ops`), and `STAND_INS` defines a few operators of vLLM's library for the CPU. vLLM's CPU platform takes vLLM's own attention whatever is asked for;
`choose` asks the backend instead, as vLLM does on a GPU.
"""

import contextlib
import importlib.metadata
import os
import sys
import unittest
from unittest import mock

try:
    version = importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError as error:
    raise unittest.SkipTest("vLLM is not installed") from error
if not version.startswith("0.33."):
    raise unittest.SkipTest(f"vLLM 0.33 is not installed, but {version}")
if "vllm" in sys.modules:
    raise unittest.SkipTest(
        "vLLM runs on one kind of device in a process, and another test has loaded it; run this module alone"
    )

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in this process
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="",  # an installed copy of this package is not loaded
    HF_HUB_OFFLINE="1",
    TRITON_INTERPRET="1",
    CUDA_VISIBLE_DEVICES="",  # without a GPU, vLLM uses Triton only if GPUs are hidden on purpose
)

from tests.engine_cases import SMALL, VOCABULARY, WINDOW, EngineCase

import torch
import vllm
from vllm.config import CompilationMode
from vllm.platforms.cpu import CpuPlatform

import flashattn.vllm

torch.set_num_threads(1)  # more only slow such small models down

#: By the name of the class: its configuration.
MODELS = {
    "LlamaForCausalLM": SMALL,
    "MistralForCausalLM": dict(SMALL, sliding_window=WINDOW),
    # One layer has a window and one has none, and so vLLM manages two kinds of blocks.
    "Gemma2ForCausalLM": dict(SMALL, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=20),
    "BloomForCausalLM": dict(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2),  # ALiBi
    "GptOssForCausalLM": dict(  # sinks
        SMALL,
        sliding_window=WINDOW,
        num_local_experts=3,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def mixture_of_experts(out, rows, w13, w2, bias13, bias2, factors, experts, unscaled, activation, isa):
    """Of GPT-OSS, as transformers has it."""
    assert activation == "swigluoai" and not unscaled, (activation, unscaled)
    hidden = torch.einsum("tkij,tj->tki", w13[experts.long()], rows) + bias13[experts.long()]
    gate, up = hidden[..., ::2].clamp(max=7), hidden[..., 1::2].clamp(-7, 7)
    results = (
        torch.einsum("tkij,tkj->tki", w2[experts.long()], (up + 1) * gate * torch.sigmoid(1.702 * gate)) + bias2[experts.long()]
    )
    out.copy_((results * factors.unsqueeze(-1)).sum(1))


def pack(given, packed, isa):
    packed.copy_(given)


#: Operators of vLLM's library for the CPU that these models reach.
STAND_INS = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,  # keeps memory on NUMA nodes
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
    "prepack_moe_weight(Tensor given, Tensor(a!) packed, str isa) -> ()": pack,
    "cpu_fused_moe(Tensor(a!) out, Tensor rows, Tensor w13, Tensor w2, Tensor? bias13, Tensor? bias2, Tensor factors, Tensor experts,"
    " bool unscaled, str activation, str isa) -> ()": mixture_of_experts,
}  # fmt: skip
LIBRARY = torch.library.Library("_C", "FRAGMENT")
for schema, function in STAND_INS.items():
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CPU" if "Tensor" in schema else "CompositeExplicitAutograd")


def choose(cls, selected_backend, attn_selector_config, num_heads=None):
    reasons = selected_backend.get_class().validate_configuration(
        device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
    )
    if reasons:
        raise ValueError(f"{selected_backend.name} is refused: {reasons}")
    return selected_backend.get_path()


class EngineTest(EngineCase):
    MODELS = MODELS
    SIZE = 16  # tokens in a block of the cache

    def setUp(self):
        super().setUp()
        patch = mock.patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(choose))
        patch.start()
        self.addCleanup(patch.stop)
        flashattn.vllm.register()

    def save(self, name, dtype=torch.float32):
        model = super().save(name, dtype)
        for block in model.transformer.h if name == "BloomForCausalLM" else ():
            block.mlp.gelu_impl = torch.nn.GELU()  # as in vLLM; transformers has the approximation by tanh
        return model

    @contextlib.contextmanager
    def engine(self, new_runner=True, **given):
        with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(new_runner))):
            options = dict(
                attention_backend="FA_C", dtype="float32", skip_tokenizer_init=True, enforce_eager=True, compilation_config={"custom_ops": ["none"]},
                max_model_len=256, max_num_seqs=self.RUNNING, max_num_batched_tokens=self.BUDGET, block_size=self.SIZE, kv_cache_memory_bytes=4 << 20,
                enable_prefix_caching=False,
            )  # fmt: skip
            llm = vllm.LLM(str(self.model), **{**options, **given})
            client = llm.llm_engine.engine_core
            try:
                runner = client.engine_core.model_executor.driver_worker.worker.model_runner
                self.assertEqual(
                    type(runner).__module__, "vllm.v1.worker." + ("cpu.model_runner" if new_runner else "cpu_model_runner")
                )
                for cache in runner.kv_caches:
                    cache.fill_(torch.nan if cache.is_floating_point() else 0x7F)  # NaN, also of e4m3 in bytes: what nobody wrote must not be read
                yield llm
            finally:
                client.shutdown()

    def generate(self, llm, prompts):
        """Outputs, and by layer what the backend was called with: (new tokens of each request, their lengths, the largest number of new tokens)."""
        batches = {}
        forward = flashattn.vllm.Implementation.forward

        def noting(implementation, layer, query, key, value, kv_cache, attn_metadata, *rest, **named):
            batch = attn_metadata
            seen = (batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist(), batch.max_query_len)
            batches.setdefault(layer.layer_name, []).append(seen)
            return forward(implementation, layer, query, key, value, kv_cache, batch, *rest, **named)

        parameters = vllm.SamplingParams(
            temperature=0, max_tokens=self.NEW, ignore_eos=True, logprobs=self.LIKELY, detokenize=False
        )
        with mock.patch.object(flashattn.vllm.Implementation, "forward", noting):
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        self.assertEqual(len(batches), 2)
        first, second = batches.values()
        self.assertEqual(first, second)
        return outputs, first

    def assert_as_transformers(self, model, prompts, outputs, tolerance=EngineCase.TOLERANCE):
        answers = []
        for output in outputs:
            (completion,) = output.outputs
            likely = [{token: given.logprob for token, given in each.items()} for each in completion.logprobs]
            answers.append((list(completion.token_ids), likely))
        super().assert_as_transformers(model, prompts, answers, tolerance)

    def assert_batched(self, batches):
        """Steps keep to the limits. Some have as many requests as there may be, some continue a prompt, some have prompts next to decode."""
        for rows, lengths, longest in batches:
            self.assertLessEqual(sum(rows), self.BUDGET)
            self.assertLessEqual(len(lengths), self.RUNNING)
            self.assertLessEqual(max(rows), longest)
        self.assertTrue(any(len(rows) == self.RUNNING for rows, _, _ in batches))
        self.assertTrue(any(1 < n < length for rows, lengths, _ in batches for n, length in zip(rows, lengths)))
        self.assertTrue(any(min(rows) == 1 < max(rows) for rows, _, _ in batches))

    def computed(self, batches):
        return sum(sum(rows) for rows, _, _ in batches)

    def test_models(self):
        for name in MODELS:
            with self.subTest(name):
                model, prompts = self.save(name), self.prompts()
                with self.engine() as llm:
                    outputs, batches = self.generate(llm, prompts)
                self.assert_as_transformers(model, prompts, outputs)
                self.assert_batched(batches)
                self.assertEqual(self.computed(batches), self.needed(prompts))

    def test_prefix_caching(self):
        """The same requests twice: the second time, answers are in the cache, too."""
        for name, new_runner in (
            ("LlamaForCausalLM", True),
            ("MistralForCausalLM", True),
            ("Gemma2ForCausalLM", True),
            ("Gemma2ForCausalLM", False),
        ):
            with self.subTest(name, new_runner=new_runner):
                model, prompts = self.save(name), self.prompts(shared=37)
                with self.engine(new_runner, enable_prefix_caching=True) as llm:
                    for again in (False, True):
                        outputs, batches = self.generate(llm, prompts)
                        self.assert_as_transformers(model, prompts, outputs)
                        cached = [output.num_cached_tokens for output in outputs]
                        self.assertEqual(self.computed(batches), self.needed(prompts) - sum(cached))
                        if not again:
                            self.assert_batched(batches)
                        if name == "LlamaForCausalLM":  # which blocks behind a window stay in the cache is vLLM's choice
                            expected = [(len(prompt) - 1 if again else 37) // self.SIZE * self.SIZE for prompt in prompts]
                            self.assertEqual(cached[self.RUNNING :], expected[self.RUNNING :])
                        elif again:
                            self.assertGreater(sum(cached), 0)

    def test_cache_runs_out(self):
        """Three prompts of three blocks each run in a cache of ten. When they need a fourth, one gives its blocks away and is computed again later."""
        model = self.save("LlamaForCausalLM")
        prompts = [self.tokens(n) for n in torch.randint(44, 48, (self.REQUESTS,), generator=self.generator).tolist()]
        for new_runner in (True, False):
            with self.subTest(new_runner=new_runner):
                with self.engine(new_runner, max_model_len=144, num_gpu_blocks_override=11) as llm:
                    outputs, batches = self.generate(llm, prompts)
                self.assert_as_transformers(model, prompts, outputs)
                self.assertGreater(self.computed(batches), self.needed(prompts))

    def test_speculative_decoding(self):
        """Tokens are proposed where the last one was seen before, and several are verified in one step."""
        model, prompts = self.save("MistralForCausalLM"), self.prompts()
        prompts = [prompt + prompt[:7] for prompt in prompts]
        proposals = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        with self.engine(speculative_config=proposals) as llm:
            outputs, batches = self.generate(llm, prompts)
        self.assert_as_transformers(model, prompts, outputs)
        self.assertGreater(self.computed(batches), self.needed(prompts))

    def test_model_traced_by_dynamo(self):
        """As under torch.compile, except that what was traced runs without Inductor. Triton's interpreter cannot run the warm-up of kernels."""
        model, prompts = self.save("Gemma2ForCausalLM"), self.prompts()
        with mock.patch.dict(os.environ, VLLM_CPU_CI_ENV="1"):
            with self.engine(enforce_eager=False, kernel_config={"enable_jit_warmup": False}) as llm:
                self.assertEqual(llm.llm_engine.vllm_config.compilation_config.mode, CompilationMode.DYNAMO_TRACE_ONCE)
                outputs, batches = self.generate(llm, prompts)
        self.assert_as_transformers(model, prompts, outputs)
        self.assert_batched(batches)

    def test_narrow_types(self):
        """Next to fp32 on the same parameters, where transformers in the narrow type is the measure."""
        for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
            with self.subTest(dtype=dtype):
                model, prompts = self.save("MistralForCausalLM", dtype), self.prompts()
                with self.engine(dtype=name) as llm:
                    outputs, _ = self.generate(llm, prompts)
                given = [(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs)]
                narrow = [self.expected(model, *each) for each in given]
                model.float()
                error = max(float((x - self.expected(model, *each)).abs().max()) for x, each in zip(narrow, given))
                self.assert_as_transformers(model, prompts, outputs, error)

    def test_fp8_cache(self):
        model, prompts = self.save("LlamaForCausalLM"), self.prompts()
        with self.engine(kv_cache_dtype="fp8") as llm:
            self.assertIs(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches[0].dtype, torch.uint8)
            outputs, batches = self.generate(llm, prompts)
        self.assert_batched(batches)
        self.assert_as_transformers_with_fp8_cache(model, prompts, outputs)

    def test_batch_invariance(self):
        model, prompts = self.save("Gemma2ForCausalLM"), self.prompts(shared=37)
        with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"), self.engine(enable_prefix_caching=True) as llm:
            outputs, batches = self.generate(llm, prompts)
        self.assert_as_transformers(model, prompts, outputs)
        self.assert_batched(batches)

    def test_vllm_measures_memory_and_chooses_the_size_of_blocks(self):
        model, prompts = self.save("LlamaForCausalLM"), self.prompts()
        with self.engine(
            block_size=None, kv_cache_memory_bytes=None, gpu_memory_utilization=0.3, num_gpu_blocks_override=20
        ) as llm:
            outputs, _ = self.generate(llm, prompts)
        self.assert_as_transformers(model, prompts, outputs)

    def test_what_the_backend_refuses_stops_the_engine(self):
        self.save("LlamaForCausalLM")
        with self.assertRaisesRegex(ValueError, "FA_C is refused: .*kv_cache_dtype"), self.engine(kv_cache_dtype="fp8_e5m2"):
            pass


if __name__ == "__main__":
    unittest.main()
