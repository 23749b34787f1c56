# SPDX-License-Identifier: Apache-2.0
"""flashattn.torch.scaled_dot_product_attention takes what PyTorch's takes: any number of dimensions, broadcasting, grouped heads, masks of
every shape, autocast. Compared with PyTorch's in float64.
"""

import random
import unittest

from tests.torch_cases import DEVICES, SEED, TorchCase

import torch

from flashattn.torch import scaled_dot_product_attention


def in_float64(query, key, value, attn_mask=None, **options):
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), attn_mask, **options
        )


class DropInTest(TorchCase):
    def check(self, q, k, v, mask=None, **options):
        ours = scaled_dot_product_attention(q, k, v, mask, **options)
        theirs = in_float64(q, k, v, mask, **options)
        self.assertEqual(ours.shape, theirs.shape)
        given = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
        self.assert_same(ours, theirs, given)

    def test_dimensions(self):
        for device in DEVICES:
            dtype = torch.float32 if device == "cpu" else torch.float16
            for leading in ((), (3,), (2, 3), (2, 3, 4), (2, 1, 3, 2)):
                for causal in (False, True):
                    with self.subTest(device=device, leading=leading, causal=causal):
                        q, k, v = (self.normal(*leading, n, 16, device=device, dtype=dtype) for n in (13, 17, 17))
                        self.check(q, k, v, is_causal=causal)
                        self.check(q.transpose(-1, -2).contiguous().transpose(-1, -2), k, v, is_causal=causal)

    def test_broadcasting(self):
        for device in DEVICES:
            dtype = torch.float32 if device == "cpu" else torch.float16
            for q, k, v in (
                ((2, 4), (1, 4), (1, 4)),  # keys and values of one batch
                ((2, 4), (2, 1), (2, 1)),  # of one head
                ((2, 4), (1, 1), (1, 1)),
                ((2, 4), (2, 1), (1, 4)),
                ((2, 1), (2, 4), (2, 4)),  # queries of one head
                ((1, 4), (3, 4), (3, 4)),
                ((2, 4), (4,), (4,)),  # fewer dimensions
                ((2, 4), (), ()),
                ((4,), (2, 4), (2, 1, 4)),
                ((2, 3, 4), (1, 3, 1), (3, 4)),
                ((1, 17), (1,), (1, 17)),  # rows of keys that look like heads
            ):
                with self.subTest(device=device, q=q, k=k, v=v):
                    self.check(
                        self.normal(*q, 13, 16, device=device, dtype=dtype),
                        self.normal(*k, 17, 16, device=device, dtype=dtype),
                        self.normal(*v, 17, 24, device=device, dtype=dtype),
                    )

    @unittest.skipUnless(
        "enable_gqa" in (torch.nn.functional.scaled_dot_product_attention.__doc__ or ""), "PyTorch 2.5 is needed"
    )
    def test_grouped_heads(self):
        for q, k, v in (
            ((2, 6), (2, 3), (2, 3)),
            ((2, 6), (2, 3), (2, 2)),
            ((6,), (2,), (2,)),
            ((2, 6), (1, 2), (1, 2)),
            ((5, 2, 6), (2, 3), (2, 3)),
        ):
            with self.subTest(q=q, k=k, v=v):
                self.check(self.normal(*q, 13, 16), self.normal(*k, 17, 16), self.normal(*v, 17, 16), enable_gqa=True)

    def test_masks(self):
        full = (2, 4, 13, 17)
        for device in DEVICES:
            dtype = torch.float32 if device == "cpu" else torch.float16
            for shape in (
                full,
                (1, 1, 13, 17),
                (2, 1, 1, 17),
                (2, 1, 13, 1),
                (1, 4, 1, 1),
                (4, 13, 17),
                (13, 17),
                (13, 1),
                (1, 17),
                (1, 1),
            ):
                q, k, v = (self.normal(2, 4, n, 16, device=device, dtype=dtype) for n in (13, 17, 17))
                with self.subTest(device=device, shape=shape):
                    self.check(q, k, v, self.normal(*shape, device=device, dtype=dtype))
                    self.check(q, k, v, self.normal(*shape, device=device, dtype=dtype, grad=False))
                    visible = self.coin(*shape, device=device)
                    if shape[-1] == 17:
                        visible[..., 0] = True  # PyTorch gives NaN where nothing is visible
                    else:
                        visible[:] = True
                    self.check(q, k, v, visible)
        for shape in ((13, 17), (4, 13, 17), (1, 4, 1, 17), (3, 1, 13, 17), (2, 3, 4, 13, 17), (2, 1, 1, 13, 1)):
            with self.subTest(dimensions=5, shape=shape):
                q, k, v = (self.normal(2, 3, 4, n, 16) for n in (13, 17, 17))
                self.check(q, k, v, self.normal(*shape))
        for shape in ((13, 17), (1, 17)):
            with self.subTest(dimensions=2, shape=shape):
                self.check(self.normal(13, 16), self.normal(17, 16), self.normal(17, 16), self.normal(*shape))

    def test_random_shapes(self):
        """What PyTorch takes, this takes."""
        chance = random.Random(SEED)

        def some(dims, keep):
            """The dimensions, some of them as 1, and without some of those in front."""
            dims = [n if chance.random() < 0.7 else 1 for n in dims]
            while len(dims) > keep and dims[0] == 1 and chance.random() < 0.5:
                dims = dims[1:]
            return dims

        for _ in range(300):
            leading = [chance.choice((1, 2, 3)) for _ in range(chance.randrange(4))]
            rows, keys, columns, value_columns = (chance.choice(n) for n in ((1, 3, 17), (1, 3, 33), (4, 16), (8, 24)))
            q = self.normal(*some(leading, 0), rows, columns)
            k, v = self.normal(*some(leading, 0), keys, columns), self.normal(*some(leading, 0), keys, value_columns)
            options = chance.choice(
                ({}, {"is_causal": True}, {"scale": chance.random() + 0.1}, {"mask": torch.float32}, {"mask": torch.bool})
            )
            if "mask" in options:
                shape = some([*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), rows, keys], 2)
                mask = self.normal(*shape) if options["mask"] == torch.float32 else self.coin(*shape)
                if mask.dtype == torch.bool:
                    mask[..., :: 2 if shape[-1] > 1 else 1] = True
                options = {"mask": mask}
            with self.subTest(q=tuple(q.shape), k=tuple(k.shape), v=tuple(v.shape), options=options.keys()):
                self.check(q, k, v, **options)

    def test_a_mask_of_one_column_hides_rows(self):
        """The rows it hides are 0 and give no gradient; the others are as without it."""
        q, k, v = (self.normal(2, 4, n, 16) for n in (13, 17, 17))
        visible = self.coin(2, 1, 13, 1)
        visible[:, :, :2] = torch.tensor([True, False]).view(2, 1)
        expected = in_float64(q, k, v) * visible
        self.assert_same(scaled_dot_product_attention(q, k, v, visible), expected, [q, k, v])

    def test_padded_batch(self):
        """Left padding as a mask of bool: (batch, 1, 1, keys); NaN in keys that nobody sees stays there."""
        for device in DEVICES:
            dtype = torch.float32 if device == "cpu" else torch.float16
            q, k, v = (self.normal(3, 4, 17, 16, device=device, dtype=dtype) for n in range(3))
            visible = (torch.arange(17) >= torch.tensor([0, 5, 16]).view(3, 1, 1, 1)).to(device)
            causal = torch.ones(17, 17, dtype=torch.bool, device=device).tril()
            spoilt = [torch.where(visible.transpose(2, 3), x, torch.nan) for x in (k, v)]
            ours = scaled_dot_product_attention(q, *spoilt, visible, is_causal=True)
            seen = (visible & causal).any(-1, keepdim=True)
            theirs = in_float64(q, k, v, visible & causal | ~seen) * seen
            self.assert_same(ours, theirs, [q])

    def test_empty(self):
        for q, k in (
            ((0, 4, 13), (0, 4, 17)),
            ((2, 4, 0), (2, 4, 17)),
            ((2, 4, 13), (2, 4, 0)),
            ((0, 3, 4, 13), (0, 3, 4, 17)),
        ):
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(q=q, k=k, dtype=dtype):
                    given = [
                        self.normal(*q, 16, dtype=dtype),
                        self.normal(*k, 16, dtype=dtype),
                        self.normal(*k, 16, dtype=dtype),
                    ]
                    out = scaled_dot_product_attention(*given)
                    self.assertEqual(out.shape, given[0].shape)
                    out.sum().backward()  # an expanded gradient, all of whose strides are 0
                    for x in given:
                        self.assertEqual(float(x.grad.abs().sum()), 0)

    def test_autocast(self):
        q, k, v = (self.normal(2, 4, n, 16) for n in (13, 17, 17))
        mask = self.normal(13, 17)
        for device in DEVICES:
            for dtype in (torch.bfloat16, torch.float16):
                on_device = [x.detach().to(device).requires_grad_() for x in (q, k, v, mask)]
                with self.subTest(device=device, dtype=dtype), torch.autocast(device, dtype):
                    ours = scaled_dot_product_attention(*on_device)
                    theirs = torch.nn.functional.scaled_dot_product_attention(*on_device)
                    self.assertEqual((ours.dtype, theirs.dtype), (dtype, dtype))
                    mixed = scaled_dot_product_attention(on_device[0], on_device[1].to(dtype), on_device[2])
                    self.assertEqual(mixed.dtype, dtype)
                # Results and gradients are those of inputs that were cast before, bit for bit: gradients have 16 bits on their way to fp32.
                cast = scaled_dot_product_attention(*(x.to(dtype) for x in on_device))
                self.assertTrue(torch.equal(ours, cast))
                dout = self.normal(*ours.shape, device=device, dtype=dtype, grad=False)
                for mine, its in zip(*(torch.autograd.grad(out, on_device, dout, retain_graph=True) for out in (ours, cast))):
                    self.assertEqual(mine.dtype, torch.float32)
                    self.assertTrue(torch.equal(mine, its))
                self.assert_same(ours, in_float64(*(x.to(dtype) for x in on_device)), on_device, computed_in=dtype)
            with torch.autocast(device, dtype, enabled=False):
                self.assertEqual(scaled_dot_product_attention(*(x.to(device) for x in (q, k, v))).dtype, torch.float32)

    def test_refusals(self):
        def given(*shapes):
            return [self.normal(*shape, grad=False) for shape in shapes]

        for error, text, arguments, options in (
            (ValueError, "query has 1 dimensions", given((16,), (17, 16), (17, 16)), {}),
            (
                ValueError,
                "query has 4 heads, key 2 and value 2; enable_gqa=True",
                given((4, 13, 16), (2, 17, 16), (2, 17, 16)),
                {},
            ),
            (ValueError, "needs divisors", given((4, 13, 16), (3, 17, 16), (3, 17, 16)), {"enable_gqa": True}),
            (ValueError, "do not broadcast", given((2, 4, 13, 16), (3, 4, 17, 16), (3, 4, 17, 16)), {}),
            (ValueError, "attn_mask has shape .12, 17., which", given((4, 13, 16), (4, 17, 16), (4, 17, 16), (12, 17)), {}),
            (
                ValueError,
                "attn_mask has shape .2, 4, 13, 17., which",
                given((4, 13, 16), (4, 17, 16), (4, 17, 16), (2, 4, 13, 17)),
                {},
            ),
            (ValueError, "scale is -1", given((13, 16), (17, 16), (17, 16)), {"scale": -1.0}),
            (TypeError, "q has dtype torch.float64", [x.double() for x in given((13, 16), (17, 16), (17, 16))], {}),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(error, text):
                scaled_dot_product_attention(*arguments, **options)


if __name__ == "__main__":
    unittest.main()
