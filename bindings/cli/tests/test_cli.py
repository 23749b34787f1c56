# SPDX-License-Identifier: Apache-2.0
"""Runs every command of the tool: output, exit status, files, and the words of its refusals.

FLASHATTN_CLI is the program, FLASHATTN_SPOILER a library that spoils results when it is preloaded.
"""

import json
import os
import subprocess
import tempfile
import unittest
import xml.dom.minidom
from pathlib import Path

CLI = os.environ["FLASHATTN_CLI"]


class CliTest(unittest.TestCase):
    def run_cli(self, *arguments, status=0, **environment):
        result = subprocess.run([CLI, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
        self.assertEqual(result.returncode, status, f"{arguments}\n{result.stdout}{result.stderr}")
        if status in (2, 3):
            self.assertEqual(result.stdout if status == 2 else "", "")
            self.assertTrue(result.stderr)
        return result.stdout if status in (0, 1) else result.stderr

    def refused(self, words, *arguments):
        self.assertIn(words, self.run_cli(*arguments, status=2))


class General(CliTest):
    def test_help_and_version(self):
        overview = self.run_cli("--help")
        for command in ("info", "explain", "bench", "verify"):
            self.assertIn(f"  {command} ", overview)
            self.assertIn(f"usage: flashattn {command}", self.run_cli(command, "--help"))
        self.assertRegex(self.run_cli("--version"), r"^flashattn \d+\.\d+\.\d+\n$")

    def test_wrong_commands(self):
        self.assertIn("usage: flashattn COMMAND", self.run_cli(status=2))
        self.refused("unknown command sing", "sing")
        for command in ("info", "explain", "bench", "verify"):
            self.refused("unknown argument --no-such", command, "--no-such")

    def test_no_space_left(self):
        with open("/dev/full", "w") as full:
            result = subprocess.run([CLI, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, 3)
        self.assertIn("cannot write the output", result.stderr)


class Info(CliTest):
    def test_text(self):
        text = self.run_cli("info")
        for words in ("libflashattn", "cpu_isas", "\ncpu: ", "cpu_", "backward", "paged keys", "dropout"):
            self.assertIn(words, text)

    def test_json(self):
        told = json.loads(self.run_cli("info", "--json"))
        self.assertIn("version", told["build"])
        cpu = told["devices"][0]
        self.assertEqual(cpu["type"], "cpu")
        self.assertGreater(cpu["threads"], 0)
        self.assertEqual(len(cpu["kernels"]), 24)
        self.assertTrue(all(kernel["kernel"] for kernel in cpu["kernels"]))
        self.assertEqual(cpu["features"]["causal"], {"forward": True, "backward": True})
        self.assertEqual(cpu["features"]["paged keys"], {"forward": True, "backward": False})
        self.assertTrue(told["no_cuda_because"] or len(told["devices"]) > 1)


class Explain(CliTest):
    def test_numbers(self):
        told = json.loads(self.run_cli("explain", "--q", "2x64x8x32", "--k=2x96x4x32", "--device", "cpu", "--threads", "1", "--json",
                                       "--dtype", "fp32", "--peak-tflops", "1", "--peak-gbytes", "100"))
        self.assertEqual(told["status"], "FA_OK")
        self.assertIn("cpu_", told["kernel"])
        self.assertEqual(told["flops"], 4 * 2 * 64 * 96 * 8 * 32)
        self.assertEqual(told["bytes"], 4 * (2 * (2 * 64 * 8 * 32) + 2 * (2 * 96 * 4 * 32) + 2 * 8 * 64))
        self.assertAlmostEqual(told["compute_seconds"], told["flops"] / 1e12)
        self.assertAlmostEqual(told["memory_seconds"], told["bytes"] / 100e9)
        self.assertEqual(told["bound"], "compute" if told["compute_seconds"] > told["memory_seconds"] else "memory")
        one_query = json.loads(self.run_cli("explain", "--q", "1x1x8x128", "--k", "1x100000x8x128", "--device", "cpu", "--json"))
        self.assertEqual(one_query["bound"], "memory")
        self.assertIn("measured", one_query["peak_source"])

    def test_every_option(self):
        peaks = ("--device", "cpu", "--peak-tflops", "1", "--peak-gbytes", "1")
        for options, words in (
            (["--causal"], "causal"), (["--causal-top-left"], "top left"), (["--window", "128,-"], "window 128,-"),
            (["--softcap", "30"], "softcap"), (["--bias", "1x8x256x256"], "bias 1x8x256x256"),
            (["--block-mask", "64x64"], "block mask 64x64"), (["--alibi"], "alibi"), (["--sink"], "sink"),
            (["--alibi", "--alibi-log-scale", "0.5"], "logarithmic alibi"),
            (["--dropout", "0.1"], "dropout"), (["--packed"], "packed"), (["--heads-first"], "heads first"),
            (["--deterministic"], "deterministic"), (["--batch-invariant"], "batch-invariant"), (["--same-bits"], "same bits"),
            (["--fp32-products"], "fp32 products"), (["--splits", "2"], ""),
            (["--scale", "0.5"], ""), (["--v", "1x256x8x80"], "v 1x256x8x80"), (["--dtype", "fp16"], "fp16"),
        ):
            for backward in ([], ["--backward"]):
                with self.subTest(options=options, backward=backward):
                    text = self.run_cli("explain", "--q", "1x256x8x64", *options, *backward, *peaks)
                    self.assertIn(words, text)
                    self.assertIn("backward," if backward else "forward,", text)
        self.assertIn("pages of 16", self.run_cli("explain", "--q", "1x1x8x64", "--k", "1x99x8x64", "--pages", "16", *peaks))

    def test_a_problem_larger_than_memory(self):
        text = self.run_cli("explain", "--q", "64x1000000x64x128", "--device", "cpu")
        self.assertRegex(text, r"bound +compute")

    def test_what_the_library_refuses(self):
        text = self.run_cli("explain", "--q", "1x64x8x1000", "--device", "cpu", status=1)
        self.assertRegex(text, r"refused +FA_ERROR_\w+\nwhy +\S*.*1000")
        text = self.run_cli("explain", "--q", "1x64x8x64", "--alibi-log-scale", "0.5", "--device", "cpu", status=1)
        self.assertIn("alibi_log_scale is 0.5 but alibi_slopes is absent", text)
        told = json.loads(self.run_cli("explain", "--q", "1x64x8x64", "--pages", "16", "--backward", "--device", "cpu", "--json",
                                       status=1))
        self.assertEqual(told["status"], "FA_ERROR_UNSUPPORTED")
        self.assertIn("page", told["reason"])

    def test_wrong_arguments(self):
        q = ("explain", "--q", "1x64x8x64")
        self.refused("explain needs --q", "explain")
        self.refused("--q needs a value", "explain", "--q")
        self.refused("--q needs a shape such as 2x4096x32x128, not '1x64x8'", "explain", "--q", "1x64x8")
        self.refused("--q needs a whole number from 1 to", "explain", "--q", "1x64xeightx64")
        self.refused("--q needs a whole number", "explain", "--q", "1x0x8x64")
        self.refused("--q needs a whole number", "explain", "--q", "1x99999999999999999999x8x64")
        self.refused("--k has batch 2, --q has 1", *q, "--k", "2x64x8x64")
        self.refused("--k has head_dim 32, --q has 64", *q, "--k", "1x64x8x32")
        self.refused("--q must come before --k", "explain", "--k", "1x64x8x64")
        self.refused("--v needs the rows and heads of --k", *q, "--k", "1x64x8x64", "--v", "1x65x8x64")
        self.refused("--dtype needs fp32, fp16 or bf16, not 'int8'", *q, "--dtype", "int8")
        self.refused("--window needs two limits", *q, "--window", "5")
        self.refused("--bias needs four sizes", *q, "--bias", "64x64")
        self.refused("--block-mask needs a block", *q, "--block-mask", "64")
        self.refused("--dropout needs a number from 0 to 0.999, not '1'", *q, "--dropout", "1")
        self.refused("--softcap needs a number", *q, "--softcap", "nan")
        self.refused("--causal takes no value", *q, "--causal=yes")
        self.refused("--packed and --pages exclude each other", *q, "--packed", "--pages", "16")
        self.refused("more than 2^56 elements", "explain", "--q", "1000000x1000000x1000x512")
        self.refused("--device needs cpu, cuda, cuda:N or auto, not 'tpu'", *q, "--device", "tpu")
        self.refused("--isa needs auto, portable, avx2, avx512, avx512_bf16, amx, neon, neon_fhm, neon_bf16 or sve256, not 'mmx'", *q, "--isa", "mmx")

    def test_a_device_that_is_not_there(self):
        self.assertIn("FA_ERROR_", self.run_cli("explain", "--q", "1x64x8x64", "--device", "cuda:999", status=3))
        self.assertIn("FA_ERROR_INVALID_ARGUMENT", self.run_cli("explain", "--q", "1x64x8x64", "--device", "cpu", "--arch", "80", status=3))


class Bench(CliTest):
    quick = ("bench", "--device", "cpu", "--threads", "2", "--seconds", "0.01", "--seqlens", "64,128", "--head-dims", "32", "--heads", "2")

    def test_grid_json_and_plot(self):
        with tempfile.TemporaryDirectory() as folder:
            rows_file, plot = Path(folder) / "rows.json", Path(folder) / "rows.svg"
            text = self.run_cli(*self.quick, "--dtypes", "fp32,fp16,bf16", "--json", str(rows_file), "--svg", str(plot))
            told = json.loads(rows_file.read_text())
            self.assertEqual(len(told["rows"]), 2 * 3 * 2 * 2)
            for row in told["rows"]:
                self.assertGreater(row["seconds"], 0)
                visible = 128 * 129 / 2 if row["mask"] == "causal" else 128 * 128
                if row["seqlen_q"] == 128 and row["pass"] == "forward":
                    self.assertAlmostEqual(row["flops_per_second"] * row["seconds"] / (4 * visible * 2 * 32), 1, places=5)
                self.assertIn(row["kernel"], text)
            svg = xml.dom.minidom.parse(str(plot))
            self.assertEqual(len(svg.getElementsByTagName("circle")), len(told["rows"]))
            self.assertEqual(len(svg.getElementsByTagName("polyline")), 2 * len(told["rows"]) // 2)
            self.assertIn("backward bf16 D32 causal", plot.read_text())

    def test_one_problem(self):
        text = self.run_cli("bench", "--device", "cpu", "--seconds", "0.01", "--q", "1x33x4x16", "--k", "1x50x2x16", "--causal", "--sink",
                            "--backward")
        self.assertIn("backward, bf16, q 1x33x4x16, k 1x50x2x16, v 1x50x2x16, causal, sink", text)

    def test_what_the_library_refuses(self):
        text = self.run_cli("bench", "--device", "cpu", "--q", "1x64x3x64", "--k", "1x64x2x64", status=1)
        self.assertIn("FA_ERROR_", text)

    def test_progress_bar(self):
        run = lambda *how: subprocess.run([CLI, *self.quick, *how], capture_output=True, text=True, check=True)
        self.assertEqual(run().stderr, "")
        shown = run("--progress")
        self.assertIn("] 7/8 backward, bf16", shown.stderr)
        self.assertNotIn("\r", shown.stdout)
        self.assertEqual(run("--progress", "--no-progress").stderr, "")

    def test_wrong_arguments(self):
        self.refused("--passes needs forward or backward, not 'sideways'", "bench", "--passes", "sideways")
        self.refused("--masks needs full or causal, not 'half'", "bench", "--masks", "half")
        self.refused("--seqlens needs a whole number", "bench", "--seqlens", "64,,128")
        self.refused("--seconds needs a number", "bench", "--seconds", "0")
        words = self.run_cli(*self.quick, "--passes", "forward", "--json", "/nonexistent/rows.json", status=3)
        self.assertIn("cannot write /nonexistent/rows.json", words)


class Verify(CliTest):
    def test_all_is_right(self):
        text = self.run_cli("verify", "--device", "cpu")
        self.assertRegex(text, r"\n93 passed, 0 failed, 3 without a kernel\n$")
        self.assertIn("forward bf16 packed sequences", text)

    def test_a_wrong_result_is_found(self):
        text = self.run_cli("verify", "--device", "cpu", "--quiet", "--filter", "forward", status=1, LD_PRELOAD=os.environ["FLASHATTN_SPOILER"])
        self.assertRegex(text, r"forward fp16 plain +FAILED: the error of out is [\d.]+ times the allowed one")
        self.assertRegex(text, r"\n32 passed, 16 failed, 0 without a kernel\n$")

    def test_filter(self):
        text = self.run_cli("verify", "--device", "cpu", "--isa", "portable", "--threads", "1", "--filter", "fp32 sink")
        self.assertIn("2 passed, 0 failed", text)
        self.assertIn("portable", text)
        self.refused("--filter leaves no case", "verify", "--device", "cpu", "--filter", "nothing like it")


if __name__ == "__main__":
    unittest.main()
