# SPDX-License-Identifier: Apache-2.0
"""Attention for SGLang 0.5.23, over its KV cache. Where this package is installed, SGLang loads it by itself (entry point `sglang.srt.plugins`):

    sglang serve --model-path MODEL --attention-backend fa_c

Decoder layers in fp16, bf16 or fp32, with prefill, chunked prefill and decode, grouped heads, sliding windows, sinks and softcap, at any page size. The
cache may be fp8 (`--kv-cache-dtype fp8_e4m3`); queries and results are not quantised. With `--enable-deterministic-inference` a token's bits depend on its own
request alone: not on the batch, nor on how its prompt is divided, nor on what the radix cache had already.
What SGLang asks for beyond that raises NotImplementedError. The interface is SGLang's and changes from version to version.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple

import sglang
import torch
from torch import Tensor

VERSION = "0.5.23"
if sglang.__version__ != VERSION and not sglang.__version__.startswith(VERSION + "."):  # SGLang logs this and goes on without the backend
    raise ImportError(f"SGLang {sglang.__version__} is installed; the attention backend of flashattn is for SGLang {VERSION}")

from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec

from ._options import problem_of
from ._torch_ops import _context, _stream, _viewer

__all__ = ["Backend", "Metadata", "register"]

NAME = "fa_c"
_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE)
_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, _FP8)


@dataclasses.dataclass
class Metadata:
    """A batch. The lengths stay on the device, so nothing is planned on the host."""

    #: (requests) int32, (requests, pages) int32
    seq_lens: Tensor
    page_table: Tensor
    max_seq_len: int
    #: (requests + 1) int32 where requests have any number of queries; None where each has one
    query_starts: Optional[Tensor] = None
    max_query_len: int = 1
    tokens: int = 0


class Backend(AttentionBackend):
    """Attention of all layers of a model."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if model_runner.use_mla_backend:
            raise NotImplementedError(f"the model has latent attention (MLA); the attention backend {NAME} has none")
        if not isinstance(pool, MHATokenToKVPool):
            raise NotImplementedError(
                f"the KV cache is a {type(pool).__name__}; the attention backend {NAME} needs an MHATokenToKVPool "
                "(models with sliding windows: --disable-hybrid-swa-memory)"
            )
        if pool.dtype not in _DTYPES:
            raise NotImplementedError(f"the KV cache has dtype {pool.dtype}; the attention backend {NAME} needs fp16, bf16, fp32 or e4m3")
        if pool.is_quantized_kv_cache or hasattr(pool, "get_kv_scale_buffer"):
            raise NotImplementedError(f"the KV cache is a {type(pool).__name__}, with scales of blocks; the attention backend {NAME} has one scale a layer")
        if pool.use_hnd or pool.kv_cache_layout != "nhd":
            raise NotImplementedError(f"the KV cache has layout {pool.kv_cache_layout}; the attention backend {NAME} needs nhd")
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool
        self.page_size = pool.page_size
        self.same_bits = bool(get_exec().deterministic.enable_deterministic_inference)
        self._graph: Optional[Tuple[Tensor, Tensor]] = None

    def _pages(self, batch: Any, max_seq_len: int) -> Tensor:
        """(requests, pages) int32. The cache has pages of page_size rows, and SGLang's table has a column for each row."""
        rows = self.req_to_token_pool.req_to_token[:, : max_seq_len : self.page_size].index_select(0, batch.req_pool_indices)
        return rows if self.page_size == 1 else rows.div_(self.page_size, rounding_mode="floor")

    @staticmethod
    def _check(batch: Any) -> None:
        if batch.forward_mode not in _MODES:
            raise NotImplementedError(f"forward_mode is {batch.forward_mode.name}; the attention backend {NAME} has extend, mixed and decode")
        for name in ("spec_info", "encoder_lens", "multi_item_delimiter_indices", "attn_cp_metadata", "attn_dcp_metadata", "dcp_kv_mask"):
            if getattr(batch, name) is not None:
                raise NotImplementedError(f"{name} of the batch is given, which the attention backend {NAME} does not know")
        if batch.mha_return_lse:
            raise NotImplementedError(f"mha_return_lse of the batch is set; the attention backend {NAME} returns no lse")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """What the layers share, for a batch that runs without a CUDA graph."""
        batch = forward_batch
        self.forward_metadata = None
        if batch.forward_mode.is_idle():
            return
        self._check(batch)
        table = self.req_to_token_pool.req_to_token
        longest = table.shape[1] if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.max())
        metadata = Metadata(seq_lens=batch.seq_lens.to(torch.int32), page_table=self._pages(batch, longest), max_seq_len=longest)
        if not batch.forward_mode.is_decode():
            starts = torch.zeros(len(batch.extend_seq_lens) + 1, dtype=torch.int32, device=table.device)
            torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
            metadata.query_starts = starts
            metadata.tokens = batch.extend_num_tokens
            metadata.max_query_len = batch.extend_num_tokens if batch.extend_seq_lens_cpu is None else max(batch.extend_seq_lens_cpu)
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that captured graphs read the lengths and pages from."""
        table = self.req_to_token_pool.req_to_token
        pages = -(-table.shape[1] // self.page_size)
        self._graph = (
            torch.ones(max_bs, dtype=torch.int32, device=table.device),
            torch.zeros(max_bs, pages, dtype=torch.int32, device=table.device),
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """What the layers share, for a graph of decode that is captured or replayed: it may serve sequences of any length."""
        batch = forward_batch
        self._check(batch)
        if not batch.forward_mode.is_decode() or self._graph is None:
            raise NotImplementedError(
                f"forward_mode is {batch.forward_mode.name}; the attention backend {NAME} has CUDA graphs of decode alone, after init_cuda_graph_state"
            )
        longest = self.req_to_token_pool.req_to_token.shape[1]
        seq_lens, page_table = (buffer[: batch.batch_size] for buffer in self._graph)
        seq_lens.copy_(batch.seq_lens[: batch.batch_size])
        page_table.copy_(self._pages(batch, longest))
        self.forward_metadata = Metadata(seq_lens=seq_lens, page_table=page_table, max_seq_len=longest)

    def support_triton(self) -> bool:
        """Whether SGLang may use its helper kernels in Triton."""
        return self.req_to_token_pool.req_to_token.is_cuda

    def _attend(
        self, q: Tensor, k: Optional[Tensor], v: Optional[Tensor], layer: Any, batch: Any, save_kv_cache: bool, sinks: Optional[Tensor], others: Any
    ) -> Tensor:
        for name, given in others.items():
            if given is not None:
                raise NotImplementedError(f"{name} is given, which the attention backend {NAME} does not know")
        for name, given, only in (
            ("attn_type", layer.attn_type, AttentionType.DECODER),
            ("is_cross_attention", layer.is_cross_attention, False),
            ("use_irope", layer.use_irope, False),
            ("pos_encoding_mode", layer.pos_encoding_mode, "NONE"),
            ("xai_temperature_len", max(layer.xai_temperature_len, -1), -1),
            ("logit_capping_method", layer.logit_capping_method if layer.logit_cap else "tanh", "tanh"),
        ):
            if given != only:
                raise NotImplementedError(f"{name} of the layer is {given}; the attention backend {NAME} has {only} alone")
        scales = (layer.k_scale, layer.v_scale) if self.token_to_kv_pool.dtype is _FP8 else (None, None)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), k, v, *scales)
        metadata: Any = self.forward_metadata
        keys, values = (
            cache.view(-1, self.page_size, *cache.shape[1:])
            for cache in (self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.token_to_kv_pool.get_value_buffer(layer.layer_id))
        )
        heads, tokens = layer.tp_q_head_num, q.shape[0]
        query = q.reshape(tokens, heads, layer.qk_head_dim)
        options = {
            "causal": True,
            "window": (layer.sliding_window_size if layer.sliding_window_size >= 0 else None, None),
            "scale": float(layer.scaling),
            "softcap": float(layer.logit_cap),
            "sink": None if sinks is None else sinks.detach().float(),
            "seqused_k": metadata.seq_lens,
            "page_table": metadata.page_table,
            "max_seqlen_k": metadata.max_seq_len,
            "same_bits": self.same_bits,
        }
        for name, scale in zip(("k_descale", "v_descale"), scales):
            if scale is not None:
                options[name] = scale.detach().float().expand(metadata.seq_lens.shape[0], keys.shape[2])
        if metadata.query_starts is None:
            query = query.unsqueeze(1)
            output = q.new_empty(tokens, heads * layer.v_head_dim)
        else:
            options["cu_seqlens_q"] = metadata.query_starts
            options["max_seqlen_q"] = metadata.max_query_len
            # Rows of padding belong to no request.
            output = (q.new_empty if tokens == metadata.tokens else q.new_zeros)(tokens, heads * layer.v_head_dim)
        view = _viewer(q.device)
        problem = problem_of(query, keys, values, options, view, [])
        problem.out = view(output.view(*query.shape[:-1], layer.v_head_dim), "out")
        _context(q.device)._run_forward(problem, _stream(q.device))
        return output

    def forward_decode(
        self, q: Tensor, k: Optional[Tensor], v: Optional[Tensor], layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        sinks: Optional[Tensor] = None, **others: Any
    ) -> Tensor:  # fmt: skip
        """Attention of one query of each request over the cache, which gets its key and value first."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, others)

    def forward_extend(
        self, q: Tensor, k: Optional[Tensor], v: Optional[Tensor], layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        sinks: Optional[Tensor] = None, **others: Any
    ) -> Tensor:  # fmt: skip
        """Attention of the newest tokens of each request over the cache, which gets their keys and values first."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, others)


def register() -> None:
    """Makes the backend fa_c known to SGLang, which calls this in each of its processes. Calling it again changes nothing."""
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(Backend)
    for choices in (ATTENTION_BACKEND_CHOICES, DETERMINISTIC_ATTENTION_BACKEND_CHOICES, RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND):
        if NAME not in choices:
            choices.append(NAME)
