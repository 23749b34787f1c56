# SPDX-License-Identifier: Apache-2.0
"""flashattn.torch under torch.func: grad, vjp, jvp, vmap, per-sample gradients; what has no derivative says so; checkpoints and torch.compile."""

import types
import unittest

from tests.torch_cases import DEVICES, TorchCase, reference

import torch
from torch.autograd import forward_ad

import flashattn
from flashattn._torch_ops import _Transformed
from flashattn.torch import attention, scaled_dot_product_attention


def by_definition(
    q, k, v, *, causal=False, bias=None, sink=None, element_mask=None, alibi_slopes=None, seqused_k=None, seqstart_k=None
):
    """`attention` in float64, with the options that these tests map; returns (out, lse)."""
    b, s, h, _ = q.shape
    t = k.shape[1]
    visible = torch.ones(b, h, s, t, dtype=torch.bool)
    keys = torch.arange(t)
    used = torch.full((b,), t) if seqused_k is None else seqused_k
    shift = (used - s).view(-1, 1, 1, 1)
    queries = torch.arange(s).view(s, 1)
    if causal:
        visible = visible & (keys <= queries + shift)
    visible = visible & (keys < used.view(-1, 1, 1, 1))
    if seqstart_k is not None:
        visible = visible & (keys >= seqstart_k.view(-1, 1, 1, 1))
    if element_mask is not None:
        visible = visible & element_mask
    if alibi_slopes is not None:
        slopes = alibi_slopes.view(1, -1, 1, 1) if alibi_slopes.dim() == 1 else alibi_slopes.view(b, -1, 1, 1)
        distance = -slopes.double() * (queries + shift - keys).abs()
        bias = distance if bias is None else bias.double() + distance
    return reference(q, k, v, visible, bias=bias, sink=sink)


class FuncTest(TorchCase):
    def check_mapped(self, in_dims, numbers=None, numbers_of_one=None, **given):
        """vmap of attention, and of its vjp, against a sample at a time by definition. `given` holds the tensors by name, `in_dims` where each is
        mapped (not at all where it says nothing).
        """
        options = numbers or {}
        names = list(given)
        dims = tuple(in_dims.get(name) for name in names)
        size = next(given[name].shape[dim] for name, dim in zip(names, dims) if dim is not None)
        wanted = [n for n, name in enumerate(names) if given[name].dtype == torch.float32 and name != "alibi_slopes"]

        def ours(*tensors):
            return attention(return_lse=True, **dict(zip(names, tensors)), **options)

        def both(attend, dout, dlse, *tensors):
            floats = [tensors[n] for n in wanted]

            def of_floats(*floats):
                every = list(tensors)
                for n, x in zip(wanted, floats):
                    every[n] = x
                return attend(*every)

            (out, lse), pull = torch.func.vjp(of_floats, *floats)
            return (out, lse, *pull((dout.to(out.dtype), dlse.to(lse.dtype))))

        samples = [[x if dim is None else x.select(dim, n) for x, dim in zip(given.values(), dims)] for n in range(size)]
        first = ours(*samples[0])
        dout = self.normal(size, *first[0].shape, grad=False)
        dlse = self.normal(size, *first[1].shape, grad=False)
        mapped = torch.vmap(lambda *x: both(ours, *x), in_dims=(0, 0, *dims))(dout, dlse, *given.values())

        def theirs(*tensors):
            return by_definition(**dict(zip(names, tensors)), **options)

        one_by_one = [both(theirs, dout[n], dlse[n], *samples[n]) for n in range(size)]
        for got, expected in zip(mapped, zip(*one_by_one)):
            expected = torch.stack(expected)
            torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-4, atol=1e-4)
        only_out = torch.vmap(lambda *x: ours(*x)[0], in_dims=dims)(*given.values())
        torch.testing.assert_close(only_out, mapped[0])

    def qkv(self, *leading, rows=(7, 9), heads=(4, 2)):
        q = self.normal(*leading, rows[0], heads[0], 16, grad=False)
        return {"q": q, **{name: self.normal(*leading, rows[1], heads[1], 16, grad=False) for name in "kv"}}

    def test_vmap(self):
        every = {"q": 0, "k": 0, "v": 0}
        self.check_mapped(every, **self.qkv(3, 2))
        self.check_mapped(every, {"causal": True}, **self.qkv(3, 1))
        moved = {name: x.movedim(0, 2) for name, x in self.qkv(3, 2).items()}
        self.check_mapped({"q": 2, "k": 2, "v": 2}, **moved)
        shared = self.qkv(2)
        self.check_mapped({"q": 0}, q=self.normal(3, 2, 7, 4, 16, grad=False), k=shared["k"], v=shared["v"])
        self.check_mapped({"v": 1}, q=shared["q"], k=shared["k"], v=self.normal(2, 3, 9, 2, 16, grad=False))

    def test_vmap_of_masks(self):
        every = {"q": 0, "k": 0, "v": 0}
        for shape in ((2, 4, 7, 9), (1, 4, 7, 9), (2, 1, 1, 9), (1, 1, 7, 9)):
            with self.subTest(shape=shape):
                self.check_mapped(every, bias=self.normal(*shape, grad=False), **self.qkv(3, 2))
                self.check_mapped({**every, "bias": 0}, bias=self.normal(3, *shape, grad=False), **self.qkv(3, 2))
                self.check_mapped({"bias": 0}, bias=self.normal(3, *shape, grad=False), **self.qkv(2))
                self.check_mapped({"element_mask": 0}, element_mask=self.coin(3, *shape), **self.qkv(2))
                self.check_mapped(every, element_mask=self.coin(*shape), **self.qkv(3, 2))
        starts = torch.tensor([[0, 3], [4, 1], [2, 8]], dtype=torch.int32)
        self.check_mapped({**every, "seqstart_k": 0}, seqstart_k=starts, **self.qkv(3, 2))
        self.check_mapped(every, {"causal": True}, seqused_k=starts[1] + 5, **self.qkv(3, 2))
        slopes = self.normal(3, 2, 4, grad=False).abs()
        self.check_mapped({**every, "alibi_slopes": 0}, alibi_slopes=slopes, **self.qkv(3, 2))
        self.check_mapped({**every, "alibi_slopes": 0}, alibi_slopes=slopes[:, 0], **self.qkv(3, 2))
        self.check_mapped(every, alibi_slopes=slopes[0, 0], **self.qkv(3, 2))
        self.check_mapped(every, alibi_slopes=slopes[0], **self.qkv(3, 2))

    def test_vmap_sample_by_sample(self):
        """Sinks belong to all sequences, so samples cannot share a call."""
        every = {"q": 0, "k": 0, "v": 0}
        self.check_mapped(every, sink=self.normal(4, grad=False), **self.qkv(3, 2))
        self.check_mapped({**every, "sink": 0}, sink=self.normal(3, 4, grad=False), **self.qkv(3, 2))

    def test_vmap_of_packed_and_of_slices(self):
        starts = [0, 3, 8]
        q, k, v = (self.normal(3, 8, 2, 16, grad=False) for _ in range(3))

        def packed(q, k, v):
            return attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)

        torch.testing.assert_close(torch.vmap(packed)(q, k, v), torch.stack([packed(*x) for x in zip(q, k, v)]))
        slices = torch.tensor([[[0, 8, 0, 3, 0]], [[0, 4, 2, 8, 0]], [[0, 8, 0, 8, 1]]], dtype=torch.int32)
        mapped = torch.vmap(lambda q, k, v, s: attention(q[None], k[None], v[None], slices=s)[0])(q, k, v, slices)
        expected = [attention(a[None], b[None], c[None], slices=s)[0] for a, b, c, s in zip(q, k, v, slices)]
        torch.testing.assert_close(mapped, torch.stack(expected))
        tables = torch.tensor([[[1, 0]], [[0, 2]], [[2, 1]]], dtype=torch.int32)  # (samples, batch, pages) of one cache
        mapped = torch.vmap(lambda table: attention(q[:1], k[:, :4], v[:, :4], page_table=table))(tables)
        expected = [
            attention(q[:1], k[table[0], :4].flatten(0, 1)[None], v[table[0], :4].flatten(0, 1)[None]) for table in tables
        ]
        torch.testing.assert_close(mapped, torch.stack(expected))

    def test_vmap_in_vmap(self):
        x = self.qkv(2, 3, 2)
        mapped = torch.vmap(torch.vmap(lambda q, k, v: attention(q, k, v, causal=True)), in_dims=(1, 1, 1))(*x.values())
        expected = attention(*(y.transpose(0, 1).flatten(0, 2) for y in x.values()), causal=True)
        torch.testing.assert_close(mapped.flatten(0, 2), expected)

    def test_grad(self):
        for device in DEVICES:
            dtype = torch.float32 if device == "cpu" else torch.float16
            q, k, v = (self.normal(2, 4, n, 16, device=device, dtype=dtype, grad=False) for n in (13, 17, 17))
            dout = self.normal(2, 4, 13, 16, device=device, dtype=dtype, grad=False)

            def loss(q, k, v):
                return (scaled_dot_product_attention(q, k, v, is_causal=True) * dout).sum()

            given = [x.clone().requires_grad_() for x in (q, k, v)]
            expected = torch.autograd.grad(loss(*given), given)
            for got in (
                torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v),
                torch.func.vjp(loss, q, k, v)[1](torch.ones((), device=device, dtype=dtype)),
            ):
                for mine, its in zip(got, expected):
                    torch.testing.assert_close(mine, its)
            torch.testing.assert_close(torch.func.grad(loss, argnums=1)(q, k, v), expected[1])

    def test_gradients_by_sample(self):
        """The gradient of a model's parameters for each sample of a batch, as differential privacy needs it."""

        def attend(parameters, x):
            q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (x @ parameters["qkv"]).tensor_split(3, -1))
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ parameters["out"]

        parameters = {"qkv": self.normal(32, 96, grad=False), "out": self.normal(32, 32, grad=False)}
        x = self.normal(5, 7, 32, grad=False) / 6
        by_sample = torch.vmap(torch.func.grad(lambda p, x: attend(p, x[None]).square().sum()), in_dims=(None, 0))(
            parameters, x
        )
        for n in range(5):
            leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
            attend(leaves, x[n : n + 1]).square().sum().backward()
            for name, p in leaves.items():
                torch.testing.assert_close(by_sample[name][n], p.grad, rtol=1e-3, atol=1e-3)

    def test_jacobian(self):
        q, k, v = (self.normal(1, 1, n, 4, grad=False) for n in (2, 3, 3))
        ours = torch.func.jacrev(lambda q: scaled_dot_product_attention(q, k, v))(q)
        theirs = torch.func.jacrev(lambda q: reference(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2))(q)
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-4)

    def test_dropout(self):
        q, k, v = self.qkv(3, 1).values()
        with self.assertRaisesRegex(RuntimeError, "randomness"):
            torch.vmap(lambda q, k, v: attention(q, k, v, dropout_p=0.5))(q, k, v)
        same = torch.vmap(lambda q: attention(q, k[0], v[0], dropout_p=0.5), randomness="same")(q[:1].expand(3, -1, -1, -1, -1))
        self.assertTrue(torch.equal(same[0], same[1]))
        different = torch.vmap(lambda q: attention(q, k[0], v[0], dropout_p=0.5), randomness="different")(
            q[:1].expand(3, -1, -1, -1, -1)
        )
        self.assertFalse(torch.equal(different[0], different[1]))

    def check_tangents(self, ours, theirs, inputs, names="qkv"):
        """torch.func.jvp and dual numbers of `ours` in the inputs that `names` lists, against those of `theirs` in float64."""
        moved = {name: self.normal(*inputs[name].shape, grad=False) for name in names}
        exact = torch.func.jvp(
            lambda m: theirs(**{**{n: x.double() for n, x in inputs.items()}, **m}),
            ({n: inputs[n].double() for n in names},),
            ({n: x.double() for n, x in moved.items()},),
        )
        given = {n: inputs[n] for n in names}
        results, tangents = torch.func.jvp(lambda m: ours(**{**inputs, **m}), (given,), (moved,))
        with forward_ad.dual_level():
            duals = ours(**{**inputs, **{n: forward_ad.make_dual(x, moved[n]) for n, x in given.items()}})
            plain = [forward_ad.unpack_dual(x) for x in duals]
        for got in ((results, tangents), ([x.primal for x in plain], [x.tangent for x in plain])):
            for mine, its in zip(got, exact):
                for x, y in zip(mine, its):
                    torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-4, atol=1e-4)

    def test_forward_mode(self):
        """In any of q, k and v; with masks, used rows and padding, and in one input alone."""
        starts, used = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([9, 8], dtype=torch.int32)
        for options in (
            {},
            {"causal": True},
            {"causal": True, "seqused_k": used, "seqstart_k": starts},
            {"alibi_slopes": self.normal(4, grad=False).abs()},
        ):
            for names in ("qkv", "q", "k", "v", "qv"):
                with self.subTest(options=options, names=names):
                    self.check_tangents(
                        lambda q, k, v: attention(q, k, v, return_lse=True, **options),
                        lambda q, k, v: by_definition(q, k, v, **options),
                        self.qkv(2),
                        names,
                    )

        def transposed(q, k, v):
            return [scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=0.4)]

        def by_hand(q, k, v):
            visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril().expand(len(q), 4, -1, -1)
            return [reference(q, k, v, visible, scale=0.4)[0].transpose(1, 2)]

        self.check_tangents(transposed, by_hand, self.qkv(2, heads=(4, 4)))

    def test_forward_mode_of_packed_rows(self):
        starts = torch.tensor([0, 3, 8], dtype=torch.int32)
        q, k, v, tq, tk = (self.normal(10, 2, 16, grad=False) for _ in range(5))  # two rows belong to no sequence
        options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
        out, tangent = torch.func.jvp(lambda q, k: attention(q, k, v, **options), (q, k), (tq, tk))
        for begin, end in ((0, 3), (3, 8)):
            one = [x[None, begin:end] for x in (q, k, v, tq, tk)]
            expected = torch.func.jvp(lambda q, k: attention(q, k, one[2], causal=True), tuple(one[:2]), tuple(one[3:]))
            torch.testing.assert_close(out[None, begin:end], expected[0])
            torch.testing.assert_close(tangent[None, begin:end], expected[1])
        self.assertTrue((tangent[8:] == 0).all())

    def test_forward_mode_beside_other_transforms(self):
        q, k, v = (x.transpose(1, 2) for x in self.qkv(2, rows=(3, 4), heads=(2, 2)).values())
        attend = lambda q: scaled_dot_product_attention(q, k, v)  # noqa: E731
        torch.testing.assert_close(torch.func.jacfwd(attend)(q), torch.func.jacrev(attend)(q), rtol=1e-4, atol=1e-4)
        many, moved = self.normal(3, *q.shape, grad=False), self.normal(3, *q.shape, grad=False)
        mapped = torch.vmap(lambda q, t: torch.func.jvp(attend, (q,), (t,))[1])(many, moved)
        for n in range(3):
            torch.testing.assert_close(mapped[n], torch.func.jvp(attend, (many[n],), (moved[n],))[1])
        # Training with a tangent that is detached, as MeanFlow does.
        matrix = self.normal(16, 16)
        out, tangent = torch.func.jvp(lambda q: attend(q @ matrix), (q,), (moved[0],))
        (out - tangent.detach()).square().sum().backward()
        got, matrix.grad = matrix.grad, None
        (attend(q @ matrix) - tangent.detach()).square().sum().backward()
        torch.testing.assert_close(got, matrix.grad, rtol=1e-4, atol=1e-4)

    def test_forward_mode_of_other_inputs_raises(self):
        """What has no tangent says so and is not silently zero; what the library refuses is its error."""
        x = self.qkv(1)
        bias = self.normal(1, 1, 7, 9, grad=False)
        for name, tensor in (("bias", bias), ("sink", self.normal(4, grad=False))):
            with self.assertRaisesRegex(NotImplementedError, f"no forward-mode derivative .* with respect to {name}"):
                torch.func.jvp(lambda t: attention(**x, **{name: t}), (tensor,), (tensor,))
            with forward_ad.dual_level(), self.assertRaisesRegex(NotImplementedError, f"with respect to {name}"):
                attention(**x, **{name: forward_ad.make_dual(tensor, tensor)})
            with self.assertRaisesRegex(flashattn.Error, f"{name} is given, but fa_forward_jvp"):
                torch.func.jvp(lambda q: attention(q, x["k"], x["v"], **{name: tensor}), (x["q"],), (x["q"],))
        with self.assertRaisesRegex(flashattn.Error, "dropout_p is 0.5, but fa_forward_jvp"):
            torch.func.jvp(lambda q: attention(q, x["k"], x["v"], dropout_p=0.5), (x["q"],), (x["q"],))
        with forward_ad.dual_level():
            other = forward_ad.make_dual(bias, bias)
            self.assertEqual((attention(**x) + 0 * other.sum()).shape, x["q"].shape)  # no tangent gets here

    def test_forward_mode_of_other_devices_raises(self):
        elsewhere = [torch.empty(1, device="meta")] * 5  # out, lse, q, k, v
        ctx = types.SimpleNamespace(names=(), numbers=(), saved_tensors=elsewhere)
        with self.assertRaisesRegex(NotImplementedError, "no forward-mode derivative .* on meta"):
            _Transformed.jvp(ctx, None, None, *elsewhere[2:])

    def test_forward_mode_on_cuda(self):
        if "cuda" not in DEVICES:
            self.skipTest("PyTorch finds no GPU, or the library was built without CUDA")
        given = {name: x.to("cuda", torch.float16) for name, x in self.qkv(2).items()}
        moved = {name: torch.randn_like(x) for name, x in given.items()}
        ours = lambda m: attention(**{**given, **m}, causal=True, return_lse=True)  # noqa: E731
        if torch.cuda.get_device_capability() != (9, 0):
            with self.assertRaisesRegex(flashattn.Error, "fa_forward_jvp has CUDA kernels for Hopper"):
                torch.func.jvp(ours, (given,), (moved,))
            return
        for names in ("qkv", "q", "v"):
            direction = {name: moved[name] for name in names}
            at = {name: given[name] for name in names}
            _, tangents = torch.func.jvp(ours, (at,), (direction,))
            double = lambda tensors: {name: x.cpu().double() for name, x in tensors.items()}  # noqa: E731
            theirs = lambda m: by_definition(**{**double(given), **m}, causal=True)  # noqa: E731
            _, exact = torch.func.jvp(theirs, (double(at),), (double(direction),))
            for x, y in zip(tangents, exact):
                torch.testing.assert_close(x.cpu().double(), y, rtol=1e-2, atol=1e-2)
        with self.assertRaisesRegex(flashattn.Error, "q.dtype is float32, but fa_forward_jvp"):
            x = {name: y.float() for name, y in given.items()}
            torch.func.jvp(lambda q: attention(q, x["k"], x["v"]), (x["q"],), (x["q"],))

    def test_second_derivatives_raise(self):
        q, k, v = (y.requires_grad_() for y in self.qkv(1).values())
        (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), [q], create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "no second derivative"):
            dq.sum().backward()
        loss = lambda q: attention(q, k.detach(), v.detach()).square().sum()  # noqa: E731
        q = q.detach()
        with self.assertRaisesRegex(NotImplementedError, "no second derivative"):
            torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)
        with self.assertRaisesRegex(NotImplementedError, "no second derivative"):
            torch.func.jvp(torch.func.grad(loss), (q,), (q,))
        with self.assertRaisesRegex(NotImplementedError, "no second derivative"):
            torch.func.grad(lambda q: torch.func.jvp(loss, (q,), (q,))[1])(q)

    def test_tensors_without_gradients(self):
        """A gradient that is asked for and does not exist is an error, not None."""
        x = self.qkv(1)
        slopes = self.normal(4)
        with self.assertRaisesRegex(NotImplementedError, "alibi_slopes requires a gradient"):
            attention(**x, alibi_slopes=slopes).sum().backward()
        with self.assertRaisesRegex(NotImplementedError, "alibi_slopes requires a gradient"):
            torch.func.grad(lambda s: attention(**x, alibi_slopes=s).sum())(slopes.detach())
        q = x["q"].requires_grad_()
        attention(**x, alibi_slopes=slopes.detach()).sum().backward()
        self.assertEqual(q.grad.shape, q.shape)

    def test_checkpoint(self):
        from torch.utils.checkpoint import checkpoint

        given = self.qkv(2)
        for reentrant in (False, True):
            leaves = [x.clone().requires_grad_() for x in given.values()]
            again = [x.clone().requires_grad_() for x in given.values()]
            torch.manual_seed(3)
            checkpoint(
                lambda q, k, v: attention(q, k, v, causal=True, dropout_p=0.3), *leaves, use_reentrant=reentrant
            ).sum().backward()
            torch.manual_seed(3)
            attention(*again, causal=True, dropout_p=0.3).sum().backward()
            for x, y in zip(leaves, again):
                torch.testing.assert_close(x.grad, y.grad)

    def test_compile(self):
        """Whole graphs, with and without gradients, with sizes that change, under autocast."""

        def block(q, k, v, bias, mask, used):
            out = attention(
                q * 2,
                k,
                v,
                causal="top_left",
                window=(q.shape[1] // 2, None),
                bias=bias,
                element_mask=mask,
                seqused_k=used,
                max_seqlen_k=0,
            )
            return out.relu()

        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=None)
        for rows in ((7, 9), (8, 11), (12, 13)):
            x = self.qkv(2, rows=rows)
            bias, mask = self.normal(1, 4, *rows), self.coin(2, 1, *rows)
            leaves = [y.requires_grad_() for y in x.values()] + [bias]
            used = torch.tensor([rows[1], 3])
            self.assert_same(compiled(*leaves, mask, used), block(*leaves, mask, used), leaves)
            with torch.no_grad():
                torch.testing.assert_close(compiled(*leaves, mask, used), block(*leaves, mask, used))
        plain = torch.compile(lambda q, k, v: scaled_dot_product_attention(q, k, v), fullgraph=True, backend="aot_eager")
        q, k, v = (y.detach().transpose(1, 2).requires_grad_() for y in self.qkv(2, heads=(4, 4)).values())
        with torch.autocast("cpu", torch.bfloat16):
            self.assert_same(plain(q, k, v), scaled_dot_product_attention(q, k, v), [q, k, v])

    def test_compiled_and_transformed(self):
        """What was compiled without a transform is not used under one, nor the other way round."""
        q, k, v = (y.transpose(1, 2) for y in self.qkv(2, heads=(4, 4)).values())
        many = self.normal(3, *q.shape, grad=False)

        def loss(q):
            return scaled_dot_product_attention(q, k, v).square().sum()

        compiled = torch.compile(loss, backend="aot_eager")
        gradient = torch.func.grad(loss)(q)
        torch.testing.assert_close(compiled(q), loss(q))
        torch.testing.assert_close(torch.func.grad(compiled)(q), gradient)
        torch.testing.assert_close(torch.vmap(compiled)(many), torch.vmap(loss)(many))
        torch.testing.assert_close(torch.compile(torch.func.grad(loss), backend="aot_eager")(q), gradient)
        moved = self.normal(*q.shape, grad=False)
        _, tangent = torch.func.jvp(loss, (q,), (moved,))
        with forward_ad.dual_level():
            torch.testing.assert_close(forward_ad.unpack_dual(compiled(forward_ad.make_dual(q, moved))).tangent, tangent)
        torch.testing.assert_close(torch.func.jvp(compiled, (q,), (moved,))[1], tangent)
        whole = torch.compile(lambda q: torch.func.jvp(loss, (q,), (moved,))[1], backend="aot_eager")
        torch.testing.assert_close(whole(q), tangent)
        torch.testing.assert_close(whole(q.detach()), tangent)
        torch.testing.assert_close(compiled(q), loss(q))

        def with_dual_numbers(q):
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(loss(forward_ad.make_dual(q, moved))).tangent

        for given in (q, q.detach()):
            torch.testing.assert_close(torch.compile(with_dual_numbers, backend="aot_eager")(given), tangent)

    def test_export(self):
        class Block(torch.nn.Module):
            def forward(self, q, k, v):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        q, k, v = (y.transpose(1, 2) for y in self.qkv(2, heads=(4, 4)).values())
        exported = torch.export.export(Block(), (q, k, v))
        self.assertIn("flashattn.forward", str(exported.graph))
        torch.testing.assert_close(exported.module()(q, k, v), Block()(q, k, v))


if __name__ == "__main__":
    unittest.main()
