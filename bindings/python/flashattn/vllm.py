# SPDX-License-Identifier: Apache-2.0
"""Attention for vLLM 0.33, over its paged KV cache. Where this package is installed, vLLM loads it by itself (entry point `vllm.general_plugins`):

    vllm serve MODEL --attention-backend FA_C

Decoder layers in fp16, bf16 or fp32, with prefill and decode in one batch, grouped heads, sliding windows, sinks, softcap and ALiBi, at any block size. The
cache may be fp8 (`--kv-cache-dtype fp8`, e4m3); queries and results are not quantised. With VLLM_BATCH_INVARIANT=1 a token's bits depend on its own request
alone: not on the batch, nor on how its prompt is divided, nor on what was in the cache already.
What vLLM asks for beyond that is refused when it chooses the backend. The interface is vLLM's and changes from version to version.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, List, Optional, Tuple

import torch
import vllm
from torch import Tensor

VERSION = "0.33"
if not vllm.__version__.startswith(VERSION + "."):  # vLLM logs this and goes on without the backend
    raise ImportError(f"vLLM {vllm.__version__} is installed; the attention backend of flashattn is for vLLM {VERSION}")

from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ._options import problem_of
from ._torch_ops import _context, _stream, _viewer

__all__ = ["Backend", "Builder", "Implementation", "Metadata", "register"]

NAME = "FA_C"
MAX_HEAD_SIZE = 512
FP8 = ("fp8", "fp8_e4m3")


class Backend(AttentionBackend):
    """What vLLM asks before it chooses."""

    supported_dtypes: ClassVar[List[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[List[Any]] = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> Any:
        return Implementation

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> List[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or capability >= (8, 0)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: Optional[int],
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> Optional[str]:
        """Why not, or None. What the library refuses with `same_bits` on a GPU."""
        if not envs.VLLM_BATCH_INVARIANT or device_capability is None:
            return None
        fp8 = kv_cache_dtype in FP8
        most, step = (128, 16) if fp8 else (256, 8)
        if dtype is torch.float32:
            return "batch invariance is for fp16 and bf16 on GPUs"
        if fp8 and device_capability < (9, 0):
            return "batch invariance over fp8 caches is for Hopper"
        if head_size > most or head_size % step:
            return f"batch invariance is for head sizes up to {most} that are multiples of {step}"
        return None


@dataclasses.dataclass
class Metadata:
    """A batch, as vLLM describes it. The lengths stay on the device, so nothing is planned on the host."""

    tokens: int
    max_query_len: int
    max_seq_len: int
    #: (requests + 1) int32, (requests) int32, (requests, blocks) int32
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    causal: bool


class Builder(AttentionMetadataBuilder):
    """Metadata of a batch from vLLM's."""

    # Kernels are chosen by the largest number of query tokens, so graphs are for batches that have the same number each.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("causal is a tensor; flashattn needs all requests of a batch to be causal, or none")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name) is not None:
                raise NotImplementedError(f"{name} is given; flashattn has no such mask")
        return Metadata(
            tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            causal=common.causal,
        )


class Implementation(AttentionImpl[Metadata]):
    """The attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Optional[int] = None,
        alibi_slopes: Optional[List[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[Tensor] = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type is {attn_type}; flashattn serves decoder attention alone")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype}; flashattn serves {', '.join(Backend.supported_kv_cache_dtypes)}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = float(logits_soft_cap or 0)
        self.same_bits = bool(envs.VLLM_BATCH_INVARIANT)
        # vLLM counts the query itself.
        self.window: Tuple[Optional[int], Optional[int]] = (None, None) if sliding_window is None else (sliding_window - 1, 0)
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks are loaded by now; the library reads them as fp32."""
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float()

    def _caches(self, kv_cache: Tensor) -> Tuple[Tensor, Tensor]:
        """Keys and values (blocks, block_size, heads, head_size) of (blocks, heads, block_size, 2 head_size), whatever the strides. fp8 as vLLM stores
        it: as bytes."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    @staticmethod
    def _quantised(x: Tensor, scale: Tensor) -> Tensor:
        """x (tokens, heads, head_size) as a fp8 cache has it, in bytes. `scale`: one number, or one for each head."""
        limit = torch.finfo(torch.float8_e4m3fn).max
        return (x.float() / scale.view(-1, 1)).clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes key and value (tokens, heads, head_size) to their slots of the cache. Tokens in slot -1 are padding."""
        keys, values = self._caches(kv_cache)
        if kv_cache.is_cuda:
            from vllm import _custom_ops  # has no kernels without a GPU

            _custom_ops.reshape_and_cache_flash(
                key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
            return
        kept = (slot_mapping >= 0).nonzero().view(-1)
        slots = slot_mapping[kept]
        where = (slots // keys.shape[1], slots % keys.shape[1])
        if self.kv_cache_dtype in FP8:
            keys.view(torch.uint8)[where] = self._quantised(key[kept], layer._k_scale)
            values.view(torch.uint8)[where] = self._quantised(value[kept], layer._v_scale)
            return
        keys[where] = key[kept].to(keys.dtype)
        values[where] = value[kept].to(values.dtype)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Optional[Metadata],
        output: Tensor,
        output_scale: Optional[Tensor] = None,
        output_block_scale: Optional[Tensor] = None,
    ) -> Tensor:
        """Attention of query (tokens, heads, head_size) over the cache, which has key and value already; written to `output`, of query's shape."""
        for name, given in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if given is not None:
                raise NotImplementedError(f"{name} is given; flashattn does not quantise the output")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        batch = attn_metadata
        device = query.device
        keys, values = self._caches(kv_cache)
        if self.slopes is not None and self.slopes.device != device:
            self.slopes = self.slopes.to(device)
        options = {
            "causal": batch.causal,
            "window": self.window,
            "scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes,
            "sink": self.sinks,
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
            "seqused_k": batch.seq_lens,
            "page_table": batch.block_table,
            "max_seqlen_k": batch.max_seq_len,
            "same_bits": self.same_bits,
        }
        if self.kv_cache_dtype in FP8:
            keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
            requests = batch.seq_lens.shape[0]
            options["k_descale"] = layer._k_scale.expand(requests, self.num_kv_heads)
            options["v_descale"] = layer._v_scale.expand(requests, self.num_kv_heads)
        view = _viewer(device)
        shape = (batch.tokens, self.num_heads, self.head_size)
        problem = problem_of(query[: batch.tokens].view(shape), keys, values, options, view, [])
        problem.out = view(output[: batch.tokens].view(shape), "out")
        _context(device)._run_forward(problem, _stream(device))
        return output


def register() -> None:
    """Makes the backend FA_C known to vLLM, which calls this in each of its processes. Calling it again changes nothing."""
    known = NAME in AttentionBackendEnum.__members__
    register_backend(AttentionBackendEnum[NAME] if known else NAME, f"{__name__}.{Backend.__qualname__}")
