# SPDX-License-Identifier: Apache-2.0
"""PyTorch's FlashAttention-2, cuDNN, memory-efficient attention and FlexAttention, FlashAttention-4 where the package flash-attn-4 is installed, and
FlashMLA where FLASHMLA_LIBRARY names its extension module: forward and, but for FlexAttention, backward without autograd's host work."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import sys

import torch

from . import cases, scores

aten = torch.ops.aten


class Fa2:
    """Tensors are (batch, seqlen, heads, head_dim) views; the operators want heads second."""

    name = "fa2"
    options = ("", "dropout")

    def __init__(self, case, q, k, v):
        if q.shape[-1] != v.shape[-1]:
            raise RuntimeError("no kernel for values with a head_dim of their own")
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (q, k, v))
        self.causal, self.deterministic = case.causal, case.deterministic
        self.dropout = cases.DROPOUT if case.option == "dropout" else 0.0

    def forward(self):
        self.saved = aten._scaled_dot_product_flash_attention(self.q, self.k, self.v, self.dropout, self.causal, False)
        return self.saved[0].transpose(1, 2)

    def prepare_backward(self, dout):
        self.dout = dout.transpose(1, 2)
        self.forward()

    def backward(self):
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = self.saved
        with Deterministic(self.deterministic):
            grads = aten._scaled_dot_product_flash_attention_backward(self.dout, self.q, self.k, self.v, out, lse, cu_q, cu_k,
                                                                      max_q, max_k, self.dropout, self.causal, seed, offset)
        return [grad.transpose(1, 2) for grad in grads]


class Cudnn:
    name = "cudnn"
    options = ("", "dropout", "bias")

    def __init__(self, case, q, k, v, bias=None):
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (q, k, v))
        self.causal, self.deterministic = case.causal, case.deterministic
        self.dropout = cases.DROPOUT if case.option == "dropout" else 0.0
        self.bias = None if bias is None else bias.expand(q.shape[0], -1, -1, -1)

    def forward(self):
        self.saved = aten._scaled_dot_product_cudnn_attention(self.q, self.k, self.v, self.bias, True, self.dropout, self.causal, False)
        return self.saved[0].transpose(1, 2)

    def prepare_backward(self, dout):
        self.dout = dout.transpose(1, 2)
        self.forward()

    def backward(self):
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = self.saved
        with Deterministic(self.deterministic):
            grads = aten._scaled_dot_product_cudnn_attention_backward(self.dout, self.q, self.k, self.v, out, lse, seed, offset,
                                                                      self.bias, cu_q, cu_k, max_q, max_k, self.dropout, self.causal)
        return [grad.transpose(1, 2) for grad in grads[:3]]


class Efficient(Cudnn):
    """PyTorch's memory-efficient attention, for a bias and for wide heads."""

    name = "efficient"
    options = ("bias",)  # and none

    def forward(self):
        self.saved = aten._scaled_dot_product_efficient_attention(self.q, self.k, self.v, self.bias, True, 0.0, self.causal)
        return self.saved[0].transpose(1, 2)

    def backward(self):
        out, lse, seed, offset = self.saved
        wanted = [True, True, True, False]
        grads = aten._scaled_dot_product_efficient_attention_backward(self.dout, self.q, self.k, self.v, self.bias, out, lse, seed,
                                                                      offset, 0.0, wanted, self.causal)
        return [grad.transpose(1, 2) for grad in grads[:3]]


class Fa4:
    """FlashAttention-4. It compiles a kernel when it is first called, for seconds; afterwards a call costs it hundreds of microseconds of host time,
    which timing.side_by_side() hides. Tensors are (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu`."""

    name = "fa4"
    gradient = None  # of score_mod
    options = ("", "softcap", "alibi", *cases.SCORES, *cases.WINDOWS, *cases.SPARSE)

    def __init__(self, case, q, k, v, cu=None, block_mask=None):
        if case.section == "score" and case.head_dim != 128:
            raise RuntimeError("left out: each of its kernels takes long to compile")
        if case.option == "alibi" and not case.causal:
            raise RuntimeError("left out, for the same reason")
        from flash_attn.cute import interface

        from . import fa4_scores

        self.interface = interface
        self.q, self.k, self.v, self.deterministic = q, k, v, case.deterministic
        self.arguments = dict(causal=case.causal)
        if case.option in cases.WINDOWS:
            self.arguments = dict(window_size_left=cases.WINDOWS[case.option], window_size_right=0)
        if case.option == "softcap":
            self.arguments["softcap"] = cases.SOFTCAP
        if case.option == "alibi":
            self.arguments["score_mod"], self.gradient = fa4_scores.alibi(q.shape[-2], True)
        self.lists = self.lists_backward = {}
        if case.option in cases.SPARSE:
            visible = block_mask[0, 0] != 0
            self.set_blocks(visible, torch.zeros_like(visible), cases.SPARSE[case.option][1])
        if case.option in cases.SCORES:
            name = case.option.removeprefix("score ")
            more, self.gradient = fa4_scores.arguments(name, q, case.causal, case.seqlen_k)
            self.arguments.update(more)
            if "mask_mod" in more:
                self.set_blocks(*scores.visible_blocks(name, q, case.seqlen_k, 128), 128)
        if cu is not None:
            self.arguments.update(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k)

    def set_blocks(self, full, partial, size):
        """Blocks of which all pairs are visible, and those of which some are."""
        self.lists = self.block_lists(full, partial, size)
        self.lists_backward = self.block_lists(full.T, partial.T, size)

    @staticmethod
    def block_lists(full, partial, size):
        """By rows of blocks."""
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        lists = []
        for blocks in (partial, full):
            lists += [blocks.sum(1, dtype=torch.int32), torch.argsort(~blocks, dim=1, stable=True).to(torch.int32)]
        lists = [t[None, None].contiguous() for t in lists]
        return dict(block_sparse_tensors=BlockSparseTensorsTorch(*lists, block_size=(size, size)))

    def forward(self):
        self.out, self.lse = self.interface._flash_attn_fwd(self.q, self.k, self.v, return_lse=True, **self.arguments, **self.lists)[:2]
        return self.out

    def prepare_backward(self, dout):
        self.dout = dout
        self.forward()

    def backward(self):
        more = dict(score_mod_bwd=self.gradient) if self.gradient is not None else {}
        return self.interface._flash_attn_bwd(self.q, self.k, self.v, self.out, self.dout, self.lse, deterministic=self.deterministic,
                                              **self.arguments, **self.lists_backward, **more)[:3]


class Flex:
    """FlexAttention, compiled. `block_mask` is ours: (1, 1, blocks of queries, blocks of keys)."""

    name = "flex"
    options = (*scores.TEXTS, *cases.SCORES, *cases.WINDOWS, *cases.SPARSE)

    def __init__(self, case, q, k, v, block_mask=None):
        from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

        self.tensors = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
        visible = [lambda b, h, i, j: i >= j] if case.causal else []
        score, size = None, 128
        if case.option in cases.WINDOWS:
            visible.append(lambda b, h, i, j: i - j <= cases.WINDOWS[case.option])
        elif case.option in cases.SPARSE:
            size = cases.SPARSE[case.option][1]
            visible.append(lambda b, h, i, j: block_mask[0, 0, i // size, j // size] != 0)
        else:
            score, mask = scores.for_flex(case.option.removeprefix("score "), q, case.seqlen_k)
            visible += [mask] if mask else []
        blocks = None
        if visible:
            blocks = create_block_mask(and_masks(*visible), None, None, case.seqlen_q, case.seqlen_k, device=q.device, BLOCK_SIZE=size)
        torch._dynamo.reset()  # it compiles a function eight times at most, and runs it without compiling afterwards
        compiled = torch.compile(flex_attention, dynamic=False)
        self.run = lambda: compiled(*self.tensors, score_mod=score, block_mask=blocks)

    def forward(self):
        with torch.no_grad():
            return self.run().transpose(1, 2)

    def prepare_backward(self, dout):
        self.dout = dout.transpose(1, 2)
        self.out = self.run()

    def backward(self):
        return [grad.transpose(1, 2) for grad in torch.autograd.grad(self.out, self.tensors, self.dout, retain_graph=True)]


def fa4_version():
    """The version of the package, "" without it."""
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return ""


def has_fa4():
    return importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None


class Fa2Packed:
    """Tensors are (total, heads, head_dim)."""

    name = "fa2"

    def __init__(self, q, k, v, cu, longest, causal):
        self.q, self.k, self.v, self.cu, self.longest, self.causal = q, k, v, cu, longest, causal

    def forward(self):
        self.saved = aten._flash_attention_forward(self.q, self.k, self.v, self.cu, self.cu, self.longest, self.longest, 0.0,
                                                   self.causal, False)
        return self.saved[0]

    def prepare_backward(self, dout):
        self.dout = dout
        self.forward()

    def backward(self):
        out, lse, seed, offset, _ = self.saved
        return aten._flash_attention_backward(self.dout, self.q, self.k, self.v, out, lse, self.cu, self.cu, self.longest,
                                              self.longest, 0.0, self.causal, seed, offset)


class FlashMla:
    """DeepSeek's kernels for latent caches, as vLLM's wheel has them: vllm/_flashmla_C.abi3.so, PyTorch's stable ABI. Each query of a sequence that
    lists its keys lists `lists`; decoding from lists needs FlashMLA's own cache of 512 e4m3 numbers, 4 factors and 64 bf16 numbers a key. Decoding of
    all keys of an e4m3 cache is in the module beside it, and takes e4m3 queries. The schedule that its kernels divide the keys by is made once, ahead
    of what is timed; ours is part of each call."""

    name = "flashmla"
    library = os.environ.get("FLASHMLA_LIBRARY", "")

    def __init__(self, case, q, k, pages, lists):
        torch.ops.load_library(self.library)
        self.kernels = torch.ops._flashmla_C
        self.q, self.scale, self.causal, self.pages = q, case.head_dim**-0.5, case.causal, pages
        self.schedule = self.splits = None  # its kernels make them in the first call
        self.lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=q.device)
        self.prefill = case.listed > 0 and case.seqlen_q >= 16
        self.extension = None
        if self.prefill:
            self.q, self.k = q[0], k.reshape(-1, 1, case.head_dim)
            self.rows = self.rows_of(lists, case.page)[0, :, None].contiguous()
        elif case.listed:
            factors = torch.ones((*k.shape[:3], 4), device=q.device)
            parts = (k[..., : case.d_v].to(torch.float8_e4m3fn), factors, k[..., case.d_v :].to(torch.bfloat16))
            self.k = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).view(torch.float8_e4m3fn)
            self.rows = self.rows_of(lists, case.page)
        else:
            self.k, self.rows = k, None
            if case.cache:
                torch.ops.load_library(self.library.replace("_flashmla_C", "_flashmla_extension_C"))
                self.extension, self.q = torch.ops._flashmla_extension_C, q.to(torch.float8_e4m3fn)
                self.schedule, self.splits = self.extension.get_mla_decoding_metadata_dense_fp8(self.lengths, case.seqlen_q * case.heads_q, 1)
                self.one = torch.ones(1, device=q.device)

    def rows_of(self, lists, page):
        """The cache's rows of the listed keys of each sequence."""
        table = self.pages.long()
        places = torch.arange(len(table), device=table.device)[:, None, None]
        return (table[places, lists.long() // page] * page + lists % page).to(torch.int32)

    def forward(self):
        if self.prefill:
            return self.kernels.sparse_prefill_fwd(self.q, self.k, self.rows, self.scale, 512, None, None, None)[0][None]
        if self.extension is not None:
            return self.extension.fwd_kvcache_mla_fp8(self.q, self.k, 512, self.lengths, self.pages, self.scale, self.causal, self.schedule,
                                                      self.splits, self.one, self.one)[0]
        if self.rows is not None:
            results = self.kernels.sparse_decode_fwd(self.q, self.k, self.rows, None, None, self.schedule, self.splits, None, None, None, 512,
                                                     self.scale, None, False)
        else:
            results = self.kernels.dense_decode_fwd(self.q, self.k, 512, self.lengths, self.pages, self.scale, self.causal, self.schedule,
                                                    self.splits, None)
        out, _, self.schedule, self.splits = results
        return out


class Deterministic:
    """Asks PyTorch for its deterministic kernels while an operator is called."""

    def __init__(self, wanted):
        self.wanted = wanted

    def __enter__(self):
        if self.wanted:
            torch.utils.deterministic.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(True)

    def __exit__(self, *_):
        if self.wanted:
            torch.use_deterministic_algorithms(False)


class Read:
    """Reads keys and values and does nothing with them: what decoding can at best be."""

    name = "read"
    SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512) read_only(const float4 *data, int count, float *never) {
  const long long step = gridDim.x * 512ll;
  long long i = blockIdx.x * 512ll + threadIdx.x;
  float sum = 0;
  for (; i + 7 * step < count; i += 8 * step) {
    float4 x[8];
#pragma unroll
    for (int n = 0; n < 8; ++n)
      asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[n].x), "=f"(x[n].y), "=f"(x[n].z), "=f"(x[n].w) : "l"(data + i + n * step));
#pragma unroll
    for (int n = 0; n < 8; ++n) sum += x[n].x + x[n].y + x[n].z + x[n].w;
  }
  for (; i < count; i += step) sum += data[i].x;
  if (sum == 1e38f) *never = sum;
}
"""
    kernel = None

    def __init__(self, k, v):
        if Read.kernel is None:
            Read.kernel = torch.cuda._compile_kernel(Read.SOURCE, "read_only")
        one_memory = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        self.tensors, self.never = (k,) if one_memory else (k, v), torch.empty(1, device=k.device)
        self.blocks = 4 * torch.cuda.get_device_properties(k.device).multi_processor_count

    def forward(self):
        for t in self.tensors:
            Read.kernel((self.blocks, 1, 1), (512, 1, 1), (t.view(-1), t.numel() * t.element_size() // 16, self.never))


def able_of(case, makers):
    able = []
    for make in makers:
        try:
            opponent = make()
            opponent.forward()
            able.append(opponent)
        except RuntimeError:  # not for this shape
            pass
        except Exception as failure:  # of FlashAttention-4's compiler, or FlexAttention's
            print(f"{case.name}: {type(failure).__name__}: {failure}", file=sys.stderr)
    return able


def takes_flashmla(case):
    if not FlashMla.library or not case.latent or case.page != 64 or case.option not in ("", "e4m3"):
        return False
    # From lists its prefill takes bf16, its decoding 8 bits alone.
    return not case.listed or bool(case.option) == (case.seqlen_q < 16)


def opponents(case, q, k, v, cu, ours):
    """Those that take the case; each was called once. `ours` has a case's bias, masks, pages and lists."""
    bias, block_mask = ours.bias, ours.block_mask
    readers = []
    if case.section == "decode":
        try:
            readers.append(Read(k, v))
        except (AttributeError, RuntimeError):  # a PyTorch that compiles no kernels
            pass
    if case.page or case.cache:
        return able_of(case, [lambda: FlashMla(case, q, k, ours.pages, ours.lists)] if takes_flashmla(case) else []) + readers
    plain = dataclasses.replace(case, option="") if case.option == cases.FP8 else case  # beside our e4m3 they take the same numbers in bf16
    fa4 = [lambda: Fa4(plain, q, k, v, cu, block_mask)] if has_fa4() and case.section != "decode" and plain.option in Fa4.options else []
    if cu is not None:
        makers = [lambda: Fa2Packed(q, k, v, cu, case.seqlen_q, case.causal), *fa4]
    # PyTorch's causal mask starts at the top left: other problems than ours unless queries and keys are as many.
    elif case.causal and case.seqlen_q != case.seqlen_k:
        return readers
    else:
        makers = [lambda: Fa2(plain, q, k, v)] if plain.option in Fa2.options else []
        makers += [lambda kind=kind: kind(plain, q, k, v, bias) for kind in (Cudnn, Efficient) if plain.option in kind.options]
        makers += fa4
        makers += [lambda: Flex(plain, q, k, v, block_mask)] if plain.option in Flex.options else []
        if case.section in ("wide", cases.FP32):  # the others have no kernels for it
            makers = [lambda: Efficient(plain, q, k, v, bias)] if plain.option in ("", *Efficient.options) else []
    return able_of(case, makers) + readers
