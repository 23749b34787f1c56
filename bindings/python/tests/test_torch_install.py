# SPDX-License-Identifier: Apache-2.0
"""flashattn.torch.install(): torch.nn.functional.scaled_dot_product_attention on the library, against float64; what goes to PyTorch's kernels."""

import contextlib
import itertools
import math
import os
import pathlib
import random
import subprocess
import sys
import unittest

from tests.torch_cases import DEVICES, SEED, TorchCase

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashattn.torch
from flashattn import _torch_install
from flashattn._torch_ops import extension

HERE = pathlib.Path(__file__).resolve().parents[1]


def in_float64(query, key, value, attn_mask=None, **options):
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask, **options)


def flash():
    """PyTorch may choose nothing but flash attention."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def kernels():
    """Where PyTorch has the kernels of the operator from."""
    return torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu")


class WithoutTheExtensionTest(unittest.TestCase):
    def test_the_reason_can_be_read(self):
        code = "import flashattn.torch; print(flashattn.torch.install()); flashattn.torch.uninstall()"
        environment = {**os.environ, "FLASHATTN_TORCH_EXTENSION": "0"}
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=HERE,
            env=environment,
        )
        self.assertRegex(
            result.stderr,
            r"UserWarning: flashattn.torch.install\(\) leaves PyTorch its own attention: cpu: the extension is not loaded: FLASHATTN_TORCH_EXTENSION is 0",
        )
        self.assertRegex(
            result.stdout,
            r"^Installation\(devices=\(\), reason='cpu: the extension is not loaded: FLASHATTN_TORCH_EXTENSION is 0; cuda: ",
        )


@unittest.skipUnless(extension, f"the extension for PyTorch is not loaded: {extension.reason}")
class InstallTest(TorchCase):
    def setUp(self):
        super().setUp()
        self.installation = flashattn.torch.install()
        self.addCleanup(flashattn.torch.uninstall)

    @contextlib.contextmanager
    def own(self):
        """PyTorch's own kernels."""
        flashattn.torch.uninstall()
        yield
        flashattn.torch.install()

    def test_devices(self):
        self.assertEqual(self.installation.devices, tuple(DEVICES))
        if "cuda" not in DEVICES:
            self.assertRegex(
                self.installation.reason,
                "^cuda: (PyTorch finds no GPU|the library was built without CUDA)$",
            )

    def test_like_float64(self):
        chance = random.Random(SEED)
        for device in DEVICES:
            dtypes = (torch.float32, torch.float16, torch.bfloat16) if device == "cpu" else (torch.float16, torch.bfloat16)
            for _ in range(60):
                dtype = chance.choice(dtypes)
                b, s, t, h, group = (chance.randint(1, n) for n in (3, 40, 60, 3, 2))
                d = chance.choice((8, 16, 64))
                free = device == "cuda" and chance.random() < 0.5
                backend = contextlib.nullcontext() if free else flash()
                if device == "cuda" and not free:
                    t = s  # flash attention there has causal masks of as many keys as queries alone
                q, k, v = (
                    self.normal(*shape, device=device, dtype=dtype, grad=False)
                    for shape in ((b, h * group, s, d), *((b, h, t, d),) * 2)
                )
                if chance.random() < 0.4:  # (batch, rows, heads, head_dim) in memory, as models have it
                    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
                given = [x.requires_grad_() for x in (q, k, v)]
                choices = [
                    {},
                    {"scale": (0.5 + chance.random()) / d**0.5},
                    {"is_causal": True},
                ]
                if device == "cpu" or free:
                    shape = [n if chance.random() < 0.7 else 1 for n in (b, h * group, s, t)][chance.choice((0, 2)) :]
                    mask = self.normal(*shape, device=device, dtype=dtype, grad=False)
                    visible = self.coin(*shape, device=device)
                    visible[..., 0] = True
                    choices += [
                        {"attn_mask": mask},
                        {"attn_mask": visible},
                        {"attn_mask": mask, "scale": 0.2},
                    ]
                options = chance.choice(choices)
                with self.subTest(
                    device=device,
                    dtype=dtype,
                    shape=(b, h, group, s, t, d),
                    options=options.keys(),
                ), backend:
                    ours = scaled_dot_product_attention(*given, **options, enable_gqa=group > 1)
                    self.assert_same(ours, in_float64(*given, **options, enable_gqa=group > 1), given)
                    self.assertEqual(flashattn.torch.fallbacks(), [])

    def test_results_lie_in_memory_as_pytorchs_do(self):
        """Compiled programs rely on it."""
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)):
            for shape in ((2, 3, 5, 16), (1, 3, 5, 16), (2, 1, 1, 16)):
                q, k, v = (
                    self.normal(*shape, grad=False).permute(order).contiguous().permute([order.index(n) for n in range(4)])
                    for _ in range(3)
                )

                def everything():
                    out, lse = operator(q, k, v)
                    return (
                        out,
                        lse,
                        *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                            out, q, k, v, out, lse, 0.0, False
                        ),
                    )

                ours = everything()
                with self.own():
                    theirs = everything()
                for mine, its in zip(ours, theirs):
                    self.assertEqual((mine.stride(), mine.dtype), (its.stride(), its.dtype))
                    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)

    def test_what_the_library_refuses_goes_to_pytorch(self):
        given = [self.normal(2, 4, n, 16).double().detach().requires_grad_() for n in (13, 17, 17)]
        ours = scaled_dot_product_attention(*given, is_causal=True)
        gradients = torch.autograd.grad(ours.sum(), given)
        self.assertEqual(
            flashattn.torch.fallbacks(),
            [
                f"{name}: query has dtype torch.float64, which the library does not know"
                for name in (
                    "_scaled_dot_product_flash_attention_for_cpu",
                    "_scaled_dot_product_flash_attention_for_cpu_backward",
                )
            ],
        )
        with self.own():
            theirs = scaled_dot_product_attention(*given, is_causal=True)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            for mine, its in zip(gradients, torch.autograd.grad(theirs.sum(), given)):
                torch.testing.assert_close(mine, its, rtol=0, atol=0)
        self.assertEqual(flashattn.torch.fallbacks(), [])  # a new installation begins anew

    def test_a_mask_reaches_pytorchs_kernel(self):
        given = [self.normal(1, 2, n, 8, grad=False).double() for n in (5, 9, 9)]
        mask = self.normal(5, 9, grad=False).double()
        ours = scaled_dot_product_attention(*given, mask, scale=0.3)
        self.assertEqual(len(flashattn.torch.fallbacks()), 1)
        torch.testing.assert_close(ours, in_float64(*given, mask, scale=0.3))

    def test_only_so_many_reasons_are_kept(self):
        given = [self.normal(1, 1, 1, 8, grad=False).double()] * 3
        for _ in range(70):
            scaled_dot_product_attention(*given)
        self.assertEqual(len(flashattn.torch.fallbacks()), 64)

    def test_uninstall(self):
        self.assertIn("torch_operators.cpp", kernels())
        flashattn.torch.uninstall()
        self.assertNotIn("torch_operators.cpp", kernels())
        flashattn.torch.uninstall()
        for _ in range(2):
            flashattn.torch.install()
        flashattn.torch.uninstall()
        self.assertNotIn("torch_operators.cpp", kernels())

    @unittest.skipUnless(
        hasattr(torch.nn.attention, "activate_flash_attention_impl"),
        "this PyTorch has no registry",
    )
    def test_the_registry_of_pytorch(self):
        registry = torch.nn.attention
        self.assertIn("flashattn", registry.list_flash_attention_impls())
        self.assertEqual(registry.current_flash_attention_impl(), "flashattn")
        registry.restore_flash_attention_impl()
        self.assertIsNone(registry.current_flash_attention_impl())
        self.assertNotIn("torch_operators.cpp", kernels())
        registry.activate_flash_attention_impl("flashattn")
        self.assertIn("torch_operators.cpp", kernels())

    def test_modules_and_compile(self):
        torch.manual_seed(SEED)
        attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        x = self.normal(2, 11, 32)

        def loss(x):
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return (
                attention(x, x, x, None, False)[0].square().sum() + scaled_dot_product_attention(q, q, q, is_causal=True).sum()
            )

        for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            ours = run(x)
            (gradient,) = torch.autograd.grad(ours, [x])
            with self.own():
                theirs = loss(x)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(gradient, torch.autograd.grad(theirs, [x])[0], rtol=1e-4, atol=1e-4)

    def test_an_operator_of_another_pytorch_is_left_alone(self):
        flashattn.torch.uninstall()
        schemas, _torch_install.SCHEMAS = (
            _torch_install.SCHEMAS,
            _torch_install.SCHEMAS[2:],
        )
        try:
            with self.assertWarnsRegex(UserWarning, "has an operator that this package does not know"):
                installation = flashattn.torch.install()
        finally:
            _torch_install.SCHEMAS = schemas
        self.assertNotIn("cpu", installation.devices)
        self.assertRegex(
            installation.reason,
            "cpu: PyTorch .* has an operator that this package does not know, aten::_scaled",
        )
        self.assertNotIn("torch_operators.cpp", kernels())

    def assert_like_traced(self, mine, its):
        """Results lie in memory as compiled programs expect."""
        for one, other in zip(mine, its):
            if one is None or not isinstance(one, torch.Tensor):
                self.assertEqual(one, other)
            else:
                self.assertEqual(
                    (one.shape, one.stride(), one.dtype),
                    (other.shape, other.stride(), other.dtype),
                )

    def test_kernels_of_cuda_on_the_cpu(self):
        """The kernels for CUDA's operators know no device: here they serve tensors of the CPU, for which PyTorch has no such kernels."""
        extension.install("CPU", True, True, True)
        operators = torch.ops.aten
        for dtype, causal, masked, rows_first in itertools.product(
            (torch.float32, torch.bfloat16), (False, True), (False, True), (False, True)
        ):
            q, k, v = plain = [self.normal(2, h, 19, 16, dtype=dtype, grad=False) for h in (4, 2, 2)]
            if rows_first:
                plain = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
            mask = self.normal(2, 1, 19, 19, dtype=dtype, grad=False) if masked else None
            options = dict(is_causal=causal, scale=0.3)
            runs = {
                "cudnn": lambda *x, mask: operators._scaled_dot_product_cudnn_attention(*x, mask, True, **options),
                "efficient": lambda *x, mask: operators._scaled_dot_product_efficient_attention(
                    *x, None if mask is None else mask.expand(2, 4, 19, 19), True, **options
                ),
            }
            if not masked:
                runs["flash"] = lambda *x, mask: operators._scaled_dot_product_flash_attention(*x, **options)
            for name, run in runs.items():
                if masked and name == "efficient" and dtype == torch.float32:
                    continue  # goes to PyTorch's kernel
                with self.subTest(name, dtype=dtype, causal=causal, masked=masked, rows_first=rows_first):
                    given = [x.clone().requires_grad_() for x in plain]
                    bias = mask
                    if masked and name == "efficient":  # the only one whose mask may need a gradient
                        bias = mask.clone().requires_grad_()
                        given.append(bias)
                    results = run(*given[:3], mask=bias)
                    hidden = torch.ones(19, 19, dtype=torch.bool).triu(1) if causal else torch.zeros(19, 19, dtype=torch.bool)
                    added = torch.zeros(19, 19).double() if bias is None else bias.double()
                    expected = in_float64(*given[:3], added.masked_fill(hidden, -math.inf), scale=0.3, enable_gqa=True)
                    self.assert_same(results[0], expected, given)
                    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
                        traced = run(*map(fake.from_tensor, plain), mask=mask)
                    self.assert_like_traced(results, traced)
                    out = run(*given[:3], mask=bias)[0]
                    gradients = torch.autograd.grad(out, given[:3], torch.ones_like(out))
                    for mine, its in zip(gradients, plain):
                        if name == "efficient":
                            its = its.transpose(1, 2).contiguous().transpose(1, 2)
                        self.assertEqual(mine.stride(), its.stride())

    def test_cudnn_without_lse_and_with_other_numbers_of_rows(self):
        """Its causal mask begins at the first row and key, whatever the numbers of both."""
        extension.install("CPU", True, True, True)
        for rows, keys in ((5, 17), (17, 5)):
            given = [self.normal(1, 2, n, 8, grad=False) for n in (rows, keys, keys)]
            out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*given, None, False, 0.0, True)
            self.assertIsNone(lse)
            torch.testing.assert_close(out.double(), in_float64(*given, is_causal=True), rtol=1e-4, atol=1e-4)

    @unittest.skipUnless("cuda" in DEVICES, "needs a GPU")
    def test_what_pytorch_chooses_on_a_gpu_is_served(self):
        """Whichever operator PyTorch prefers there: the bits are the library's."""
        for dtype, causal, masked in itertools.product(
            (torch.float32, torch.float16, torch.bfloat16), (False, True), (False, True)
        ):
            fp32 = dtype == torch.float32
            if (causal or fp32) and masked or fp32 and torch.cuda.get_device_capability() != (9, 0):
                continue
            with self.subTest(dtype=dtype, causal=causal, masked=masked):
                given = [self.normal(2, 4, 100, 64, device="cuda", dtype=dtype) for _ in range(3)]
                mask = self.normal(2, 1, 100, 100, device="cuda", dtype=dtype, grad=False) if masked else None
                ours = scaled_dot_product_attention(*given, mask, is_causal=causal)
                direct = flashattn.torch.attention(*(x.transpose(1, 2) for x in given), causal=causal, bias=mask).transpose(
                    1, 2
                )
                torch.testing.assert_close(ours, direct, rtol=0, atol=0)
                dout = self.normal(*ours.shape, device="cuda", dtype=dtype, grad=False)
                for mine, its in zip(torch.autograd.grad(ours, given, dout), torch.autograd.grad(direct, given, dout)):
                    torch.testing.assert_close(mine, its, rtol=0, atol=0)
                self.assertEqual(flashattn.torch.fallbacks(), [])


if __name__ == "__main__":
    unittest.main()
