# SPDX-License-Identifier: Apache-2.0
"""flashattn.sglang inside SGLang's engine, on the CPU: `Engine(...).generate` on small models with random parameters, next to eager attention of
transformers with the same parameters. The scheduler, the radix cache, the memory of keys and values, the model runner and the models are SGLang's own.

SGLang's package has kernels for GPUs alone. Its CPU engine does without them, but imports them: `KERNELS` stands in for the package of kernels, and raises
an error if one is called.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import unittest

try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError as error:
    raise unittest.SkipTest("SGLang is not installed") from error
if version != "0.5.23" and not version.startswith("0.5.23."):
    raise unittest.SkipTest(f"SGLang 0.5.23 is not installed, but {version}")

from tests.engine_cases import SMALL, WINDOW, EngineCase

#: By the name of the class: its configuration.
MODELS = {
    "LlamaForCausalLM": SMALL,
    # Every other layer has a window. SGLang reads the name of the activation under its older key.
    "Gemma2ForCausalLM": dict(
        SMALL, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=20, hidden_act="gelu_pytorch_tanh"
    ),
    "Gemma3ForCausalLM": dict(
        SMALL, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=20
    ),
}

KERNELS = '''
"""The names of sgl_kernel without its kernels, and its scalar_type, which is Python alone."""
import importlib.abc, importlib.machinery, importlib.util, sys, types

class Missing(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        def missing(*given, **named):
            raise RuntimeError(f"sgl_kernel.{name} was called")
        return missing

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name == "sgl_kernel.scalar_type":
            return importlib.util.spec_from_file_location(name, SCALAR_TYPE)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return Missing(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
sys.modules[__name__].__class__ = Missing
'''
#: What SGLang loads in each process: our plugin, which also writes to a file what each call of a layer was about.
PLUGIN = """
import json, os
import flashattn.sglang

def register():
    flashattn.sglang.register()
    attend = flashattn.sglang.Backend._attend

    def noting(self, q, k, v, layer, batch, *rest):
        rows = [1] * batch.batch_size if batch.forward_mode.is_decode() else list(batch.extend_seq_lens_cpu)
        with open(os.environ["NOTES"], "a") as file:
            print(json.dumps([layer.layer_id, batch.forward_mode.name, rows, batch.seq_lens.tolist()]), file=file)
        return attend(self, q, k, v, layer, batch, *rest)

    flashattn.sglang.Backend._attend = noting
"""
SCRIPT = """
import json, sys

if __name__ == "__main__":
    import sglang
    options, prompts, new, likely, times = json.load(sys.stdin)
    engine = sglang.Engine(**options)
    outputs = [
        engine.generate(
            input_ids=prompts, sampling_params=dict(temperature=0, max_new_tokens=new, ignore_eos=True),
            return_logprob=True, top_logprobs_num=likely,
        )
        for _ in range(times)
    ]
    engine.shutdown()
    print("OUTPUTS", json.dumps(outputs))
"""


class EngineTest(EngineCase):
    MODELS = MODELS

    def setUp(self):
        super().setUp()
        self.notes, stand_ins = self.folder / "notes", self.folder / "stand_ins"
        package, description = stand_ins / "sgl_kernel", stand_ins / "fa_noting-1.dist-info"
        for path in (package, description):
            path.mkdir(parents=True)
        scalar_type = pathlib.Path(importlib.util.find_spec("sgl_kernel").origin).with_name("scalar_type.py")
        (package / "__init__.py").write_text(f"{KERNELS}\nSCALAR_TYPE = {str(scalar_type)!r}\n")
        (stand_ins / "fa_noting.py").write_text(PLUGIN)
        (description / "METADATA").write_text("Metadata-Version: 2.1\nName: fa-noting\nVersion: 1\n")
        (description / "entry_points.txt").write_text("[sglang.srt.plugins]\nfa_noting = fa_noting:register\n")
        self.script = stand_ins / "run_engine.py"
        self.script.write_text(SCRIPT)
        root = pathlib.Path(__file__).resolve().parent.parent
        self.environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join(map(str, (stand_ins, root))), NOTES=str(self.notes), SGLANG_USE_CPU_ENGINE="1",
            SGLANG_PLUGINS="fa_noting", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
        )  # fmt: skip

    def generate(self, prompts, times=1, **given):
        """Outputs of each time, and what the layers were called for: (mode, new tokens of each request, their lengths)."""
        options = dict(
            model_path=str(self.model), device="cpu", attention_backend="fa_c", dtype="float32", skip_tokenizer_init=True, disable_cuda_graph=True,
            disable_overlap_schedule=True, mem_fraction_static=0.3, max_total_tokens=2048, context_length=256, max_running_requests=self.RUNNING,
            chunked_prefill_size=self.BUDGET, disable_radix_cache=True, log_level="error",
        )  # fmt: skip
        asked = json.dumps([{**options, **given}, prompts, self.NEW, self.LIKELY, times])
        self.notes.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, str(self.script)], input=asked, text=True, capture_output=True, env=self.environment, timeout=300
        )
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        outputs = json.loads(done.stdout.rpartition("OUTPUTS ")[2])
        by_layer = {}
        for line in self.notes.read_text().splitlines():
            layer, *call = json.loads(line)
            by_layer.setdefault(layer, []).append(call)
        self.assertEqual(list(by_layer), [0, 1])
        self.assertEqual(by_layer[0], by_layer[1])
        return outputs, by_layer[0]

    def assert_as_transformers(self, model, prompts, outputs):
        answers = []
        for output in outputs:
            likely = [{token: logprob for logprob, token, _ in each} for each in output["meta_info"]["output_top_logprobs"]]
            answers.append((output["output_ids"], likely))
        super().assert_as_transformers(model, prompts, answers)

    def computed(self, calls):
        return sum(sum(rows) for _, rows, _ in calls)

    def test_models(self):
        for name in MODELS:
            with self.subTest(name):
                model, prompts = self.save(name), self.prompts()
                (outputs,), calls = self.generate(prompts, disable_hybrid_swa_memory=name != "LlamaForCausalLM")
                self.assert_as_transformers(model, prompts, outputs)
                self.assertEqual(self.computed(calls), self.needed(prompts))
                self.assertEqual({mode for mode, _, _ in calls}, {"EXTEND", "DECODE"})
                self.assertTrue(any(mode == "DECODE" and len(rows) == self.RUNNING for mode, rows, _ in calls))
                self.assertTrue(any(1 < n < length for _, rows, lengths in calls for n, length in zip(rows, lengths)))

    def test_radix_cache(self):
        """The same requests twice, with a beginning that all share: the second time, whole prompts are in the cache."""
        model, prompts = self.save("LlamaForCausalLM"), self.prompts(shared=37)
        for page_size in (1, 16):
            with self.subTest(page_size=page_size):
                outputs, calls = self.generate(prompts, times=2, disable_radix_cache=False, page_size=page_size)
                cached = [[output["meta_info"]["cached_tokens"] for output in each] for each in outputs]
                for each in outputs:
                    self.assert_as_transformers(model, prompts, each)
                self.assertGreater(sum(cached[0]), 0)
                for prompt, n in zip(prompts, cached[1]):
                    self.assertGreaterEqual(n, (len(prompt) - 1) // page_size * page_size)
                self.assertEqual(self.computed(calls), 2 * self.needed(prompts) - sum(map(sum, cached)))


if __name__ == "__main__":
    unittest.main()
