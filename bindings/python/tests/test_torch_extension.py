# SPDX-License-Identifier: Apache-2.0
"""The extension for PyTorch does what the kernels in Python do: results, failures, threads. The other tests of flashattn.torch run with both."""

import os
import pathlib
import random
import subprocess
import sys
import threading
import unittest
from unittest import mock

from tests.torch_cases import DEVICES, SEED, TorchCase, reference

import torch

import flashattn
from flashattn import _torch_ops
from flashattn._torch_ops import TorchExtension, extension
from flashattn.torch import attention

HERE = pathlib.Path(__file__).resolve().parents[1]


def run(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, **environment},
    )
    return result.stdout + result.stderr


class ChoiceTest(unittest.TestCase):
    """Which kernels are used, and the reason; the test needs no extension."""

    CODE = "from flashattn._torch_ops import extension; print(bool(extension), extension.reason)"

    def test_it_can_be_switched_off(self):
        self.assertEqual(
            run(self.CODE, FLASHATTN_TORCH_EXTENSION="0"),
            "False FLASHATTN_TORCH_EXTENSION is 0\n",
        )

    def test_an_explicit_choice_is_not_passed_over(self):
        self.assertIn(
            "ImportError: FLASHATTN_TORCH_EXTENSION: /nowhere.so",
            run(self.CODE, FLASHATTN_TORCH_EXTENSION="/nowhere.so"),
        )
        library = flashattn._abi.lib._name
        self.assertRegex(
            run(self.CODE, FLASHATTN_TORCH_EXTENSION=library),
            "ImportError: FLASHATTN_TORCH_EXTENSION: .*flashattn_torch_options",
        )


@unittest.skipUnless(
    extension, f"the extension for PyTorch is not loaded: {extension.reason}"
)
class ExtensionTest(TorchCase):
    def problems(self):
        """Random problems: (q, k, v) and options of the operators."""
        chance = random.Random(SEED)
        for device in DEVICES:
            for _ in range(60):
                dtype = chance.choice(
                    (torch.float32, torch.float16, torch.bfloat16)
                    if device == "cpu"
                    else (torch.float16, torch.bfloat16)
                )
                b, s, t, h, group = (chance.randint(1, n) for n in (3, 40, 60, 3, 2))
                d, e = chance.choice(((16, 16), (64, 64), (32, 16)))
                given = [
                    self.normal(*shape, device=device, dtype=dtype, grad=False)
                    for shape in ((b, s, h * group, d), (b, t, h, d), (b, t, h, e))
                ]
                if chance.random() < 0.3:  # (batch, heads, rows, columns) in memory
                    given = [
                        x.transpose(1, 2).contiguous().transpose(1, 2) for x in given
                    ]
                if chance.random() < 0.2:  # columns that are not adjacent
                    given[1] = given[1].transpose(2, 3).contiguous().transpose(2, 3)
                every = {
                    "causal": chance.randint(1, 2),
                    "window_left": chance.randint(0, 20),
                    "window_right": chance.randint(0, 20),
                    "scale": chance.random() + 0.1,
                    "softcap": 2.0,
                    "bias": self.normal(
                        1, h * group, s, t, device=device, dtype=dtype, grad=False
                    ),
                    "sink": self.normal(h * group, device=device, grad=False),
                    "alibi_slopes": self.normal(
                        h * group, device=device, grad=False
                    ).abs(),
                    "element_mask": self.coin(b, 1, s, t, device=device),
                    "seqused_k": torch.tensor(
                        [chance.randint(0, t) for _ in range(b)],
                        dtype=torch.int32,
                        device=device,
                    ),
                    "seqstart_k": torch.tensor(
                        [chance.randint(0, t) for _ in range(b)],
                        dtype=torch.int32,
                        device=device,
                    ),
                    "deterministic": True,
                    "num_splits": 1,
                }
                options = {
                    name: every[name]
                    for name in chance.sample(sorted(every), chance.randint(0, 4))
                }
                if chance.random() < 0.2:
                    options.update(
                        dropout_p=0.3,
                        dropout_seed=torch.tensor(
                            [chance.getrandbits(40)], device=device
                        ),
                    )
                yield given, options

    def test_same_bits_as_the_kernels_in_python(self):
        refused = 0
        for given, options in self.problems():
            options["deterministic"] = True
            with self.subTest(
                shapes=[tuple(x.shape) for x in given], options=options.keys()
            ):
                try:
                    expected = _torch_ops._forward(*given, **options)
                except flashattn.Error as error:
                    refused += 1
                    with self.assertRaises(RuntimeError) as caught:
                        torch.ops.flashattn.forward(*given, **options)
                    self.assertEqual(str(caught.exception), str(error))
                    continue
                results = torch.ops.flashattn.forward(*given, **options)
                for result, wanted in zip(results, expected):
                    self.assertEqual(
                        (result.dtype, result.stride()), (wanted.dtype, wanted.stride())
                    )
                    torch.testing.assert_close(result, wanted, rtol=0, atol=0)
                dout = torch.randn_like(results[0])
                dlse = torch.randn_like(results[1]).masked_fill(results[1].isinf(), 0)
                needed = [
                    True,
                    bool(self.coin(1)),
                    True,
                    "bias" in options,
                    "sink" in options,
                ]
                arguments = (dout, dlse, *results, needed, *given)
                for result, wanted in zip(
                    torch.ops.flashattn.backward(*arguments, **options),
                    _torch_ops._backward(*arguments, **options),
                ):
                    self.assertEqual(
                        (result.dtype, result.stride()), (wanted.dtype, wanted.stride())
                    )
                    torch.testing.assert_close(result, wanted, rtol=0, atol=0)
        self.assertLess(refused, 60 * len(DEVICES) // 2)

    def test_packed_sequences_have_zeros_between_them(self):
        for device in DEVICES:
            q, k, v = (
                self.normal(20, 2, 16, device=device, dtype=torch.float16, grad=False)
                for _ in range(3)
            )
            starts = torch.tensor([0, 5, 12], device=device, dtype=torch.int32)
            options = {
                "cu_seqlens_q": starts,
                "cu_seqlens_k": starts,
                "max_seqlen_q": 7,
                "max_seqlen_k": 7,
            }
            out, lse = torch.ops.flashattn.forward(q, k, v, **options)
            needed = [True, True, True, False, False]
            gradients = torch.ops.flashattn.backward(
                q, None, out, lse, needed, q, k, v, **options
            )
            for result in (out, lse.T, *gradients):
                self.assertEqual(float(result[12:].abs().sum()), 0)
                self.assertGreater(float(result[:12].abs().sum()), 0)

    def test_failures_are_those_of_the_kernels_in_python(self):
        q, k, v = (self.normal(2, 7, 4, 16, grad=False) for _ in range(3))
        for arguments, options in (
            ((q, k[..., :8], v), {}),
            ((q, k, v.double()), {}),
            ((q[0, 0], k, v), {}),
            ((q, k, v), {"bias": q[None]}),
            ((q, k, v), {"scale": 0.0}),
            ((q, k, v), {"scale": -1.0}),
            ((q, k, v), {"seqused_k": torch.ones(2)}),
            (
                (q, k, v),
                {"dropout_p": 0.5, "dropout_seed": torch.ones(2, dtype=torch.int64)},
            ),
            ((q, k, v), {"num_splits": 2**40}),
            ((q, k, v), {"block_size_q": -1}),
            ((q[:, :, :3], k, v), {}),
        ):
            with self.subTest(
                shapes=[tuple(x.shape) for x in arguments], options=options
            ):
                with self.assertRaises(Exception) as wanted:
                    _torch_ops._forward(*arguments, **dict(options))
                call = dict(zip(("q", "k", "v"), arguments)), dict(options)
                for name in ("bias", "seqused_k", "dropout_seed"):
                    if name in options:
                        call[0][name] = call[1].pop(name)
                with self.assertRaises(type(wanted.exception)) as caught:
                    _torch_ops.call(call[0], call[1])
                if "dropout_seed" not in options:
                    self.assertEqual(str(caught.exception), str(wanted.exception))
                if isinstance(wanted.exception, flashattn.Error):
                    self.assertEqual(caught.exception.status, wanted.exception.status)

    def test_failures_of_backward(self):
        q, k, v = (self.normal(2, 7, 4, 16, grad=False) for _ in range(3))
        out, lse = torch.ops.flashattn.forward(q, k, v)
        for needed, text in (
            ([True] * 3, "needed has 3 entries"),
            ([True] * 5, "dbias is needed, but bias is not given"),
        ):
            with self.assertRaisesRegex(RuntimeError, text):
                torch.ops.flashattn.backward(q, None, out, lse, needed, q, k, v)

    def test_a_failure_of_pytorch_stays_its_own(self):
        with self.assertRaises(flashattn.Error):
            attention(*(self.normal(1, 2, 3, n) for n in (4, 8, 8)))
        theirs = RuntimeError("out of memory")
        self.assertIs(extension.exception(theirs), theirs)

    def test_threads(self):
        """Each has its own contexts: one context refuses calls of two threads at once."""
        q, k, v = (self.normal(2, 4, n, 32).transpose(1, 2) for n in (200, 200, 200))
        expected, _ = reference(q, k, v)
        failures = []

        def work():
            try:
                for _ in range(20):
                    out = attention(q, k, v)
                    torch.testing.assert_close(
                        out, expected.float(), rtol=1e-4, atol=1e-4
                    )
                    torch.autograd.grad(out.sum(), [q])
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_an_extension_of_another_version_is_noticed(self):
        with mock.patch.object(
            _torch_ops, "_OPTIONS", _torch_ops._OPTIONS + ", bool new=False"
        ):
            with mock.patch.dict(os.environ, FLASHATTN_TORCH_EXTENSION=extension.path):
                with self.assertRaisesRegex(
                    ImportError,
                    "it takes other options than this package gives; build it again",
                ):
                    TorchExtension("torch")


if __name__ == "__main__":
    unittest.main()
