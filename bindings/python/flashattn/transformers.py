# SPDX-License-Identifier: Apache-2.0
"""Attention for the models of transformers (5.17 and newer) whose classes take other implementations, in one line:

    import flashattn.transformers
    model = AutoModel.from_pretrained(name, attn_implementation=flashattn.transformers.register())

Causal and bidirectional attention, sliding windows, grouped heads, sinks (GPT-OSS), softcap (Gemma 2), position bias (T5) and dropout, forward and
backward, with dynamic and static caches and padding on either side. No mask is built where lengths, starts and windows say the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .torch import attention

__all__ = ["Mask", "register"]

NAME = "fa_c"
Window = Tuple[Optional[int], Optional[int]]


@dataclasses.dataclass(eq=False)
class Mask:
    """What the queries of a forward pass see, in the terms of the library, where transformers would build (batch, 1, rows, keys).

    To code that wants a tensor it is that tensor of bool, which is built then.
    """

    batch: int
    rows: int
    keys: int
    device: torch.device
    causal: Union[bool, str]
    window: Window
    #: (batch) int32: used keys; the first key that is not padding.
    seqused_k: Optional[Tensor] = None
    seqstart_k: Optional[Tensor] = None
    #: (batch, 1, 1, keys) bool: padding that is not on one side, or whose values cannot be looked at.
    element_mask: Optional[Tensor] = None

    def options(self) -> Dict[str, Any]:
        """As options of `attention`."""
        names = ("causal", "window", "seqused_k", "seqstart_k", "element_mask")
        return {name: getattr(self, name) for name in names}

    def tensor(self) -> Tensor:
        """(batch, 1, rows, keys) bool, true where a query sees a key."""
        keys = torch.arange(self.keys, device=self.device)
        used = self.keys if self.seqused_k is None else self.seqused_k.view(-1, 1, 1, 1)
        shift = 0 if self.causal == "top_left" else used - self.rows
        distance = keys - torch.arange(self.rows, device=self.device).view(-1, 1) - shift
        visible = (keys < used).expand(self.batch, 1, self.rows, self.keys)
        if self.causal:
            visible = visible & (distance <= 0)
        if self.window[0] is not None:
            visible = visible & (distance >= -self.window[0])
        if self.window[1] is not None:
            visible = visible & (distance <= self.window[1])
        if self.seqstart_k is not None:
            visible = visible & (keys >= self.seqstart_k.view(-1, 1, 1, 1))
        return visible if self.element_mask is None else visible & self.element_mask

    def to(self, device: Any, **_: Any) -> "Mask":
        """The mask on another device, as accelerate moves arguments. A dtype changes nothing."""
        if isinstance(device, torch.dtype) or torch.device(device) == self.device:
            return self
        moved: Dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, device=torch.device(device), **moved)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.rows, self.keys))

    @property
    def ndim(self) -> int:
        return 4

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(Mask, Mask.tensor, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]


def _parts(function: Callable) -> List[Callable]:
    """The functions that `and_masks` joined."""
    if function.__qualname__ != "and_masks.<locals>.and_mask":
        return [function]
    return [part for joined in inspect.getclosurevars(function).nonlocals["mask_functions"] for part in _parts(joined)]


def _recognise(function: Callable) -> Optional[Tuple[bool, Window]]:
    """(causal, window) of a mask function of transformers; None for all that is more."""
    causal = False
    left: List[int] = []
    right: List[int] = []
    for part in _parts(function):
        if part is masking_utils.causal_mask_function:
            causal = True
        elif part.__qualname__ == "sliding_window_overlay.<locals>.inner_mask":
            left.append(inspect.getclosurevars(part).nonlocals["sliding_window"] - 1)
        elif part.__qualname__ == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            size = inspect.getclosurevars(part).nonlocals["sliding_window"]
            left.append(size)
            right.append(size)
        elif part is not masking_utils.bidirectional_mask_function:
            return None
    return causal, (min(left, default=None), min(right, default=None))


def _place(mask: Mask, q_offset: Union[int, Tensor], kv_offset: int) -> bool:
    """Aligns queries and keys: row i stands at q_offset + i, key j at kv_offset + j. False where the library cannot say that."""
    anywhere = not mask.causal and mask.window == (None, None)
    if anywhere:
        return True
    if isinstance(q_offset, Tensor):
        if not mask.causal:
            return False
        # A new tensor: static caches count their tokens in place, before the layers read the mask.
        mask.seqused_k = (q_offset + (mask.rows - kv_offset)).to(torch.int32).expand(mask.batch)
        return True
    shift = q_offset - kv_offset
    if mask.causal and shift == 0:
        mask.causal = "top_left"
        return True
    used = mask.rows + shift
    if used == mask.keys:
        return True
    if not mask.causal or not 0 <= used < mask.keys:
        return False
    mask.seqused_k = torch.full((mask.batch,), used, dtype=torch.int32, device=mask.device)
    return True


def _pad(mask: Mask, padding: Tensor) -> None:
    """Adds padding, (batch, keys) bool with true for tokens. Where nothing is traced or captured its values decide how; that waits for the device once,
    as transformers itself does.
    """
    if not masking_utils.is_tracing(padding):
        keys = torch.arange(mask.keys, device=padding.device)
        hidden = (keys >= mask.seqused_k.view(-1, 1)) if mask.seqused_k is not None else keys >= mask.keys
        lengths = padding.sum(-1, keepdim=True)
        first = torch.where(lengths > 0, padding.int().argmax(-1, keepdim=True), mask.keys)
        is_left = ((padding == (keys >= first)) | hidden).all()
        is_right = (padding == (keys < lengths)).all()
        left, some, right = torch.stack((is_left, (first > 0).any(), is_right)).tolist()
        if left:
            mask.seqstart_k = first.view(-1).to(torch.int32) if some else None
            return
        if right and (mask.causal == "top_left" or not mask.causal and mask.window == (None, None)):
            mask.seqused_k = lengths.view(-1).to(torch.int32)
            return
    mask.element_mask = padding.view(mask.batch, 1, 1, mask.keys)


@torch._dynamo.assume_constant_result
def _has_own_attention(configuration: str) -> bool:
    """Whether the models of a module of configurations never ask transformers which attention to use."""
    module = sys.modules.get(configuration.replace(".configuration_", ".modeling_"))
    return module is not None and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # int, or a tensor of one
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    use_vmap: bool = False,
    device: Any = "cpu",
    config: Any = None,
    **others: Any,
) -> Any:
    """The mask function that transformers calls. A tensor of bool where the model wants one, or where the mask is none of the library's."""
    if isinstance(attention_mask, Mask):  # made ahead of the model, for compiled generation
        return attention_mask
    if config is not None:
        kind = type(config.get_text_config())
        if _has_own_attention(kind.__module__):
            raise ValueError(
                f"the model of {kind.__name__} has an attention of its own, which transformers does not replace; use attn_implementation='eager'"
            )
    recognised = None if use_vmap else _recognise(mask_function)
    if recognised is not None and recognised[0]:
        # With one row and a static cache transformers forbids to leave a causal mask out, which a Mask does not do.
        may_skip = allow_is_causal_skip or q_length == 1
    else:
        may_skip = allow_is_bidirectional_skip
    if recognised is not None and may_skip:
        causal, window = recognised
        mask = Mask(batch_size, q_length, kv_length, torch.device(device), causal, window)
        if _place(mask, q_offset, kv_offset):
            padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
            if padding is not None:
                _pad(mask, padding[:, kv_offset : kv_offset + kv_length])
            return mask
    return masking_utils.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Union[Mask, Tensor, None],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    **others: Any,
) -> Tuple[Tensor, None]:
    """The attention function that transformers calls, on (batch, heads, rows, head_dim); returns (batch, rows, heads, head_dim).

    Windows and packed sequences are in the mask, so other arguments that repeat them are not read.
    """
    if others.get("output_attentions"):
        raise ValueError(
            "output_attentions is True, but flashattn keeps no attention probabilities; use attn_implementation='eager'"
        )
    rows, keys = query.shape[2], key.shape[2]
    options: Dict[str, Any] = {}
    bias = position_bias
    if isinstance(attention_mask, Mask):
        if (attention_mask.rows, attention_mask.keys) != (rows, keys):
            raise ValueError(
                f"the mask is for {attention_mask.rows} queries and {attention_mask.keys} keys; query has {rows} and key {keys}"
            )
        options = attention_mask.options()
    elif attention_mask is None:
        # As PyTorch aligns: the first query sees the first key, and a single one sees all.
        if rows > 1 and (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
            options["causal"] = "top_left"
    elif attention_mask.dim() != 4:
        raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; it needs (batch, heads or 1, rows, keys)")
    elif attention_mask.dtype == torch.bool:
        options["element_mask"] = attention_mask
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    if bias is not None:
        options["bias"] = bias if bias.dtype in (query.dtype, torch.float32) else bias.to(query.dtype)
    if s_aux is not None:
        options["sink"] = s_aux.float()
    if softcap is not None:
        options["softcap"] = softcap
    if query.shape[0] != key.shape[0]:  # learned queries
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(query, key, value, scale=scaling, dropout_p=dropout, **options)
    assert isinstance(out, Tensor)
    return out, None


def register(name: str = NAME) -> str:
    """Makes `attn_implementation=name` available to transformers and returns the name. Calling it again changes nothing.

    transformers treats every name with "flash" in it as that of another package, so such names are refused.
    """
    if "flash" in name:
        raise ValueError(f"name is {name!r}; transformers takes names with 'flash' in them for the package flash-attn")
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise RuntimeError(
            f"transformers {transformers.__version__} describes masks in another way; flashattn needs 5.17 or newer"
        )
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    return name
