# SPDX-License-Identifier: Apache-2.0
"""The lines of the README's table "Switching" that are Python's, executed where their packages are. docs/check_samples.py has the others."""

import importlib.util
import os
import pathlib
import shlex
import unittest

import flashattn

ROOT = pathlib.Path(__file__).resolve().parents[3]


def samples():
    spec = importlib.util.spec_from_file_location("check_samples", ROOT / "docs/check_samples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAMPLES = samples()
LINES = {name: code for _, name, code in SAMPLES.switches((ROOT / "README.md").read_text())}


def needs(*packages):
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    return unittest.skipIf(missing, f"{', '.join(missing)} is not installed")


class SwitchTest(unittest.TestCase):
    """One test for each row, test_ and the name of what one uses."""

    def test_every_row_has_a_test(self):
        rows = {name for name, language in SAMPLES.SWITCHES.items() if language == "python"}
        self.assertLessEqual(rows, set(LINES))
        self.assertEqual({self.name(row) for row in rows}, {name for name in dir(self) if name.startswith("test_")} - {"test_every_row_has_a_test"})

    @staticmethod
    def name(row):
        return "test_" + row.split(",")[0].split()[0].lower()

    def execute(self, row, **names):
        exec(LINES[row], names)
        return names

    def of_numpy(self):
        import numpy as np

        return [np.random.standard_normal((2, 19, 4, 16)).astype(np.float32) for _ in range(3)]

    def assert_causal(self, out, q, k, v):
        import numpy as np
        from tests import reference

        np.testing.assert_allclose(np.asarray(out), reference.forward(q, k, v, causal=True)[0], rtol=1e-4, atol=1e-4)

    @needs("numpy")
    def test_numpy(self):
        q, k, v = self.of_numpy()
        self.assert_causal(self.execute("NumPy", flashattn=flashattn, q=q, k=k, v=v)["out"], q, k, v)

    @needs("jax", "numpy")
    def test_jax(self):
        import jax

        jax.config.update("jax_platforms", "cpu")
        q, k, v = self.of_numpy()
        query, key, value = (jax.numpy.asarray(x) for x in (q, k, v))
        self.assert_causal(self.execute("JAX", flashattn=flashattn, query=query, key=key, value=value)["out"], q, k, v)

    def install(self, row):
        import torch
        from flashattn._torch_ops import extension

        if not extension:
            self.skipTest(f"the extension for PyTorch was not built: {extension.reason}")
        import flashattn.torch

        kernels = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu")
        self.addCleanup(flashattn.torch.uninstall)
        self.execute(row)
        self.assertNotEqual(torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu"), kernels)

    @needs("torch", "numpy")
    def test_pytorch(self):
        import torch

        self.install("PyTorch")
        arrays = self.of_numpy()
        query, key, value = (torch.from_numpy(x).transpose(1, 2) for x in arrays)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        self.assertEqual(flashattn.torch.fallbacks(), [])
        self.assert_causal(out.transpose(1, 2), *arrays)

    @needs("torch", "diffusers")
    def test_diffusers(self):
        """The same line; test_diffusers runs models."""
        self.install("diffusers")
        self.assertEqual(LINES["diffusers"], LINES["PyTorch"])

    @needs("torch", "transformers")
    def test_transformers(self):
        import torch
        import transformers

        if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 17):
            self.skipTest(f"transformers 5.17 is not installed, but {transformers.__version__}")
        config = transformers.LlamaConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96, vocab_size=100
        )
        names = dict(flashattn=flashattn, config=config, AutoModelForCausalLM=transformers.AutoModelForCausalLM)
        model = self.execute("transformers", **names)["model"].eval()
        self.assertEqual(model.config._attn_implementation, "fa_c")
        tokens = torch.randint(100, (2, 11))
        logits = model(tokens).logits
        model.double().set_attn_implementation("eager")
        torch.testing.assert_close(logits.double(), model(tokens).logits, rtol=1e-4, atol=1e-4)

    @needs("onnxruntime", "onnx", "numpy")
    @unittest.skipUnless(os.environ.get("FLASHATTN_ONNX"), "FLASHATTN_ONNX is not set")
    def test_onnx(self):
        """The line, with the library where it was built; test_onnxruntime compares results."""
        import onnxruntime

        folder, file = os.path.split(os.environ["FLASHATTN_ONNX"])
        self.assertIn(f'("{file}")', LINES["ONNX Runtime"])
        options = onnxruntime.SessionOptions()
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(folder)  # dlopen wants a path
        exec(LINES["ONNX Runtime"].replace(file, f"./{file}"), {"options": options})

    @needs("torch", "vllm")
    def test_vllm(self):
        """Its arguments, by vLLM's own parser."""
        import vllm

        if not vllm.__version__.startswith("0.33."):
            self.skipTest(f"vLLM 0.33 is not installed, but {vllm.__version__}")
        from vllm.config import AttentionConfig

        import flashattn.vllm

        flashattn.vllm.register()
        words = shlex.split(LINES["vLLM 0.33"])
        self.assertEqual(words[:2], ["vllm", "serve"])
        self.assertEqual(words[3], "--attention-backend")
        self.assertIs(AttentionConfig(backend=words[4]).backend.get_class(), flashattn.vllm.Backend)


    @needs("torch", "sglang")
    def test_sglang(self):
        """Its arguments, by SGLang's own parser."""
        import argparse

        import sglang

        if sglang.__version__ != "0.5.23":
            self.skipTest(f"SGLang 0.5.23 is not installed, but {sglang.__version__}")
        try:
            from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            self.skipTest(f"SGLang is not installed as a whole: {error}")
        import flashattn.sglang

        flashattn.sglang.register()
        words = shlex.split(LINES["SGLang 0.5.23"])
        self.assertEqual(words[:2], ["sglang", "serve"])
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        self.assertIs(ATTENTION_BACKENDS[parser.parse_args(words[2:]).attention_backend], flashattn.sglang.Backend)


if __name__ == "__main__":
    unittest.main()
