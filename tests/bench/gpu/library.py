# SPDX-License-Identifier: Apache-2.0
"""libflashattn on torch tensors, through the bindings' ctypes declarations: structs are filled once, a call is one foreign call."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bindings" / "python"))
from flashattn import _abi as abi  # noqa: E402

from . import cases, scores  # noqa: E402

DTYPES = {
    torch.float32: abi.FLOAT32,
    torch.float16: abi.FLOAT16,
    torch.bfloat16: abi.BFLOAT16,
    torch.int32: abi.INT32,
    torch.uint8: abi.UINT8,
    torch.int8: abi.INT8,
    torch.float8_e4m3fn: abi.FLOAT8_E4M3,
}


def tensor(t: torch.Tensor) -> abi.fa_tensor:
    view = abi.fa_tensor(data=t.data_ptr(), dtype=DTYPES[t.dtype], ndim=t.dim())
    view.shape[: t.dim()] = t.shape
    view.stride[: t.dim()] = t.stride()
    return view


def starts(device, batch, seqlen):
    """The first visible key of each sequence with left padding."""
    return torch.arange(batch, dtype=torch.int32, device=device) % cases.LEFT * (seqlen // cases.LEFT)


def load(path) -> ctypes.CDLL:
    """Another build of the library beside the one that the bindings have loaded, for `--before`."""
    other = ctypes.CDLL(str(Path(path).resolve()), mode=ctypes.RTLD_LOCAL)
    for name in ("fa_config_init", "fa_create", "fa_last_error", "fa_status_name", "fa_attention_init", "fa_gradients_init", "fa_plan_info_init",
                 "fa_forward_query", "fa_backward_query", "fa_forward", "fa_backward", "fa_version_string", "fa_score_source_init",
                 "fa_score_create"):
        function, known = getattr(other, name), getattr(abi.lib, name)
        function.argtypes, function.restype = known.argtypes, known.restype
    return other


class Context:
    """A context on the current CUDA device, with the kernels that a device of compute capability `arch` has (0: its own)."""

    def __init__(self, arch=0, lib=abi.lib):
        self.lib = lib
        config = abi.fa_config()
        self.check(self.lib.fa_config_init(ctypes.byref(config), ctypes.sizeof(config)))
        config.device_type = abi.DEVICE_CUDA
        config.device_index = torch.cuda.current_device()
        config.cuda_arch = arch
        self.handle = ctypes.c_void_p()
        self.check(self.lib.fa_create(ctypes.byref(self.handle), ctypes.byref(config)))

    def check(self, status):
        if status != abi.OK:
            text = self.lib.fa_last_error(getattr(self, "handle", None)).decode()
            raise RuntimeError(f"{self.lib.fa_status_name(status).decode()}: {text}")


class Attention:
    """One problem with its workspaces. Tensors are (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu`; with
    `pages`, the page table, keys and values are (pages, page_size, heads, head_dim)."""

    def __init__(self, context: Context, q, k, v, causal=False, deterministic=False, cu=None, longest=0, option="", seed=1, pages=None,
                 listed=0):
        self.context = context
        rows = q.shape[:-1]
        self.out = torch.full((*rows, v.shape[-1]), float("nan"), dtype=q.dtype, device=q.device)
        lse_shape = (rows[1], rows[0]) if cu is not None else (rows[0], rows[2], rows[1])
        self.lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
        if option == "fp8":
            q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
        self.kept = [q, k, v, cu, pages]  # what the structs point to
        self.pages = pages
        a = self.attention = abi.fa_attention()
        context.check(context.lib.fa_attention_init(ctypes.byref(a), ctypes.sizeof(a)))
        a.q, a.k, a.v, a.out, a.lse = map(tensor, (q, k, v, self.out, self.lse))
        a.mask = abi.MASK_CAUSAL if causal else abi.MASK_NONE
        a.flags = abi.FLAG_DETERMINISTIC if deterministic else 0
        if cu is not None:
            a.cu_seqlens_q = a.cu_seqlens_k = tensor(cu)
            a.max_seqlen_q = a.max_seqlen_k = longest
        if pages is not None:
            a.page_table = tensor(pages)
        self.lists = None
        if listed:  # keys of a query's sequence, all different
            keys = k.shape[1] * (pages.shape[1] if pages is not None else 1)
            lists = [torch.randperm(keys, device=q.device)[:listed] for _ in range(rows[0] * rows[1])]
            self.lists = torch.stack(lists).to(torch.int32).view(*rows[:2], listed)
            a.kv_indices = tensor(self.lists)
        self.bias = self.block_mask = None
        for one in option.split(" + "):
            self._set(one, q, k, pages, seed)
        self.gradients = self.tangents = None
        info = self._query()
        self.kernel = info.kernel.decode()
        self.workspace, self.workspace_bytes = self._workspace(info)

    def _set(self, option, q, k, pages, seed):
        a, (seqlen_q, heads) = self.attention, q.shape[-3:-1]
        seqlen_k = k.shape[-3] * (pages.shape[1] if pages is not None else 1)
        if option.split(" ")[0] in ("e4m3", "int8"):
            shape = k.shape[:3] if option.endswith(" rows") else (q.shape[0], k.shape[2])
            factors = torch.full(shape, 1 / 32 if k.dtype == torch.int8 else 1.0, device=q.device)
            self.kept.append(factors)
            a.k_descale = a.v_descale = tensor(factors)
            return
        if option == "softcap":
            a.softcap = cases.SOFTCAP
        elif option == "alibi":
            self.kept.append(torch.tensor(cases.alibi_slopes(heads), device=q.device))
            a.alibi_slopes = tensor(self.kept[-1])
        elif option in ("bias", cases.FP32_BIAS):
            dtype = torch.float32 if option == cases.FP32_BIAS else q.dtype
            self.bias = torch.randn(1, heads, seqlen_q, seqlen_k, device=q.device, dtype=dtype)
            a.bias = tensor(self.bias)
        elif option == "lengths":  # all of them, but the host does not know that
            self.kept.append(torch.full((q.shape[0],), seqlen_k, dtype=torch.int32, device=q.device))
            a.seqused_k = tensor(self.kept[-1])
        elif option == "invariant":
            a.flags |= abi.FLAG_BATCH_INVARIANT
        elif option == cases.SAME_BITS:
            a.flags |= abi.FLAG_SAME_BITS
        elif option == "dropout":
            a.dropout_p, a.dropout_seed = cases.DROPOUT, seed
        elif option == "block_mask":  # every block is visible: what the mask itself costs
            self.kept.append(torch.ones(1, 1, -(-seqlen_q // 128), -(-seqlen_k // 128), dtype=torch.uint8, device=q.device))
            a.block_mask, a.block_size_q, a.block_size_k = tensor(self.kept[-1]), 128, 128
        elif option in cases.SPARSE:  # in every row as many visible blocks, at random places
            visible, blocks = cases.visible_blocks(option, seqlen_k)
            order = torch.rand(1, 1, seqlen_q // cases.SPARSE[option][1], blocks, device=q.device).argsort(-1)
            self.block_mask = (order < visible).to(torch.uint8)
            a.block_mask, a.block_size_q, a.block_size_k = tensor(self.block_mask), cases.SPARSE[option][1], cases.SPARSE[option][1]
        elif option in cases.SCORES:
            self._set_score(option.removeprefix("score "), q, seqlen_k)
        elif option == "tree":  # draft tokens, each of which sees the cache and the branch that it continues
            shown = torch.ones(q.shape[0], 1, seqlen_q, seqlen_k, dtype=torch.uint8)
            branches = torch.eye(seqlen_q, dtype=torch.uint8)
            for n in range(1, seqlen_q):
                branches[n] += branches[(n - 1) // 2]
            shown[..., seqlen_k - seqlen_q:] = branches
            self.kept.append(shown.to(q.device))
            a.element_mask = tensor(self.kept[-1])
        elif option in cases.MASKS:
            self._set_mask(option, q.device, q.shape[0], seqlen_k)
        elif option == cases.MAX_LOGIT:
            self.kept.append(torch.empty(heads, dtype=torch.float32, device=q.device))
            a.max_logit = tensor(self.kept[-1])
        elif option == "starts":  # as many keys as `left` shows, at the front of the sequences
            self.kept.append(seqlen_k - starts(q.device, q.shape[0], seqlen_k))
            a.seqused_k = tensor(self.kept[-1])
        elif option in cases.WINDOWS:
            a.window, a.window_left = 1, cases.WINDOWS[option]
        elif option and option != "fp8":
            raise ValueError(f"unknown option {option}")

    def _set_score(self, name, q, seqlen_k):
        source, a = abi.fa_score_source(), self.attention
        self.context.check(self.context.lib.fa_score_source_init(ctypes.byref(source), ctypes.sizeof(source)))
        text = ctypes.create_string_buffer(scores.TEXTS[name].encode())
        source.text = ctypes.addressof(text)
        score = ctypes.c_void_p()
        self.context.check(self.context.lib.fa_score_create(self.context.handle, ctypes.byref(source), ctypes.byref(score)))
        a.score = score
        tensors, scalars = scores.tensors(name, q, seqlen_k)
        array = (abi.fa_score_tensor * max(len(tensors), 1))()
        for n, (data, access) in enumerate(tensors):
            array[n].tensor, array[n].access = tensor(data), access
        self.kept += [tensors, array]
        a.num_score_tensors = len(tensors)
        if tensors:
            a.score_tensors = ctypes.addressof(array)
        for n, scalar in enumerate(scalars):
            a.score_scalars[n] = scalar

    def _set_mask(self, option, device, batch, seqlen):
        a = self.attention
        if option == "documents":
            edges = [n * seqlen // cases.DOCUMENTS for n in range(cases.DOCUMENTS + 1)]
            data = torch.tensor([[x, y, x, y, abi.SLICE_FULL] for x, y in zip(edges, edges[1:])], dtype=torch.int32, device=device)
        elif option == "prefix":
            prefix = seqlen // cases.PREFIX
            data = torch.tensor([[0, seqlen, 0, prefix, abi.SLICE_FULL], [prefix, seqlen, prefix, seqlen, abi.SLICE_CAUSAL]],
                                dtype=torch.int32, device=device)
        elif option == "left":
            data = starts(device, batch, seqlen)
        else:
            data = torch.ones(1, 1, seqlen, seqlen, dtype=torch.uint8, device=device).tril()
            if option == "bits":
                bit_values = torch.tensor([1 << n for n in range(8)], dtype=torch.uint8, device=device)
                data = (data.view(1, 1, seqlen, seqlen // 8, 8) * bit_values).sum(-1, dtype=torch.uint8)
        self.kept.append(data)
        view = tensor(data)
        if option == "bits":
            view.dtype = abi.BIT
            for n in range(4):
                view.shape[n], view.stride[n] = (data.shape[n], data.stride(n) * 8) if n < 3 else (seqlen, 1)
        field = {"documents": "slices", "prefix": "slices", "left": "seqstart_k"}.get(option, "element_mask")
        setattr(a, field, view)

    def prepare_backward(self, dout):
        q, k, v = self.kept[:3]
        self.grads = [torch.full_like(t, float("nan")) for t in (q, k, v)]
        g = self.gradients = abi.fa_gradients()
        self.context.check(self.context.lib.fa_gradients_init(ctypes.byref(g), ctypes.sizeof(g)))
        g.dout, g.dq, g.dk, g.dv = map(tensor, (dout, *self.grads))
        self.kept.append(dout)
        info = self._query()
        self.kernel = info.kernel.decode()
        self.backward_workspace, self.backward_bytes = self._workspace(info)

    def prepare_jvp(self):
        q, k, v = self.kept[:3]
        tangents = [torch.randn_like(t) for t in (q, k, v)]
        results = [torch.full_like(t, float("nan")) for t in (self.out, self.lse)]
        j = self.tangents = abi.fa_jvp()
        self.context.check(self.context.lib.fa_jvp_init(ctypes.byref(j), ctypes.sizeof(j)))
        j.tq, j.tk, j.tv, j.tout, j.tlse = map(tensor, (*tangents, *results))
        self.kept += [*tangents, *results]
        info = self._query()
        self.kernel = info.kernel.decode()
        self.jvp_workspace, self.jvp_bytes = self._workspace(info)

    def _query(self):
        info = abi.fa_plan_info()
        self.context.check(self.context.lib.fa_plan_info_init(ctypes.byref(info), ctypes.sizeof(info)))
        handle, a = self.context.handle, ctypes.byref(self.attention)
        if self.tangents is not None:
            self.context.check(self.context.lib.fa_forward_jvp_query(handle, a, ctypes.byref(self.tangents), ctypes.byref(info)))
        elif self.gradients is None:
            self.context.check(self.context.lib.fa_forward_query(handle, a, ctypes.byref(info)))
        else:
            self.context.check(self.context.lib.fa_backward_query(handle, a, ctypes.byref(self.gradients), ctypes.byref(info)))
        return info

    def _workspace(self, info):
        memory = torch.empty(info.workspace_bytes + 256, dtype=torch.uint8, device=self.out.device)
        self.kept.append(memory)
        return -(-memory.data_ptr() // 256) * 256, info.workspace_bytes

    def forward(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.context.check(self.context.lib.fa_forward(self.context.handle, ctypes.byref(self.attention), self.workspace,
                                              self.workspace_bytes, stream))

    def backward(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.context.check(self.context.lib.fa_backward(self.context.handle, ctypes.byref(self.attention), ctypes.byref(self.gradients),
                                               self.backward_workspace, self.backward_bytes, stream))

    def jvp(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.context.check(self.context.lib.fa_forward_jvp(self.context.handle, ctypes.byref(self.attention), ctypes.byref(self.tangents),
                                                           self.jvp_workspace, self.jvp_bytes, stream))
