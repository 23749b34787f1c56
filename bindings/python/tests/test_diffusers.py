# SPDX-License-Identifier: Apache-2.0
"""Models of diffusers, small and with random parameters, under flashattn.torch.install(): results and gradients next to the same models in float64
on PyTorch's own attention by definition.
"""

import copy
import unittest

from tests.torch_cases import TorchCase

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

try:
    import diffusers
except ImportError as error:
    raise unittest.SkipTest("diffusers is not installed") from error
if tuple(int(n) for n in diffusers.__version__.split(".")[:2]) < (0, 42):
    raise unittest.SkipTest(f"diffusers 0.42 is not installed, but {diffusers.__version__}")

import flashattn.torch
from flashattn._torch_ops import extension

OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Calls(TorchDispatchMode):
    """Counts calls of the operator that install() serves."""

    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.number += function is OPERATOR
        return function(*arguments, **(options or {}))


@unittest.skipUnless(extension, f"the extension for PyTorch was not built: {extension.reason}")
class ModelsTest(TorchCase):
    def check(self, model, attentions, **inputs):
        """The model has so many calls of attention."""
        for parameter in model.parameters():  # some begin at zero, and hide what comes before them
            parameter.data = self.normal(*parameter.shape, grad=False) * 0.1
        model.eval()
        exact = copy.deepcopy(model).double()
        wide = {name: x.double() if torch.is_floating_point(x) else x for name, x in inputs.items()}
        with sdpa_kernel(SDPBackend.MATH):
            expected = exact(**wide, return_dict=False)[0]
        kernels = torch._C._dispatch_dump(OPERATOR.name())
        self.assertIn("cpu", flashattn.torch.install().devices)
        self.addCleanup(flashattn.torch.uninstall)
        self.assertNotEqual(torch._C._dispatch_dump(OPERATOR.name()), kernels)
        for backend in (None, "native"):  # what models have by themselves, and by its name
            if backend is not None:
                model.set_attention_backend(backend)
            with Calls() as calls:
                ours = model(**inputs, return_dict=False)[0]
            self.assertEqual(calls.number, attentions)
            self.assertEqual(flashattn.torch.fallbacks(), [])
            torch.testing.assert_close(ours, expected.float(), rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        dout = self.normal(*ours.shape, grad=False)
        got = torch.autograd.grad(ours, list(model.parameters()), dout, allow_unused=True)
        with sdpa_kernel(SDPBackend.MATH):
            right = torch.autograd.grad(expected, list(exact.parameters()), dout.double(), allow_unused=True)
        largest = max(x.abs().max().item() for x in right if x is not None)  # the bias of keys has a gradient of 0, but for rounding
        for mine, its in zip(got, right):
            self.assertEqual(mine is None, its is None)
            if mine is not None:
                torch.testing.assert_close(mine, its.float(), rtol=1e-3, atol=1e-3 * its.abs().max().item() + 1e-6 * largest)

    def test_flux(self):
        model = diffusers.FluxTransformer2DModel(
            in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        )  # fmt: skip
        self.check(
            model,
            2,
            hidden_states=self.normal(2, 20, 4, grad=False),
            encoder_hidden_states=self.normal(2, 9, 32, grad=False),
            pooled_projections=self.normal(2, 32, grad=False),
            timestep=torch.tensor([0.3, 0.7]),
            img_ids=self.normal(20, 3, grad=False),
            txt_ids=self.normal(9, 3, grad=False),
        )

    def test_pixart_with_padded_text(self):
        model = diffusers.PixArtTransformer2DModel(
            sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, caption_channels=32, in_channels=4,
            cross_attention_dim=24, out_channels=8, use_additional_conditions=False,
        )  # fmt: skip
        mask = self.coin(2, 11)
        mask[:, 0] = True
        self.check(
            model,
            4,
            hidden_states=self.normal(2, 4, 8, 8, grad=False),
            encoder_hidden_states=self.normal(2, 11, 32, grad=False),
            encoder_attention_mask=mask.float(),
            timestep=torch.tensor([3, 700]),
        )

    def test_unet(self):
        model = diffusers.UNet2DConditionModel(
            sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8, cross_attention_dim=24,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
        )  # fmt: skip
        self.check(
            model,
            8,
            sample=self.normal(2, 4, 8, 8, grad=False),
            timestep=torch.tensor(500),
            encoder_hidden_states=self.normal(2, 7, 24, grad=False),
        )


if __name__ == "__main__":
    unittest.main()
