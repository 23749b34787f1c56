# SPDX-License-Identifier: Apache-2.0
"""The options of an attention problem, and how they get into the struct `fa_attention`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from . import _abi, _tensor
from ._score import Score, set_score

View = Callable[..., _abi.fa_tensor]  # (object, its name in messages, writable=False): the object as the library sees it


@dataclass(frozen=True)
class Options:
    """Options of an attention problem. Every function takes them as keyword arguments.

    Tensors are any object `forward` takes; flashattn.h documents shapes and meaning of each field.
    """

    #: True or "bottom_right": query i sees keys j <= i + seqlen_k - seqlen_q; "top_left": j <= i. Lengths are the used ones: with `seqused_k`
    #: alone the last of all queries is aligned with the last used key, which suits a cache and not a batch padded on the right.
    causal: Union[bool, str] = False
    #: (left, right): how far back and ahead a query sees; None = no limit on that side.
    window: Tuple[Optional[int], Optional[int]] = (None, None)
    #: Scale of q k^T; None = 1 / sqrt(head_dim).
    scale: Optional[float] = None
    #: Limits the logits to (-softcap, softcap); 0 = off.
    softcap: float = 0.0
    #: Added to the logits, (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k).
    bias: Any = None
    #: uint8 or bool, one entry per block; zero masks the block.
    block_mask: Any = None
    #: Rows and columns of a block of `block_mask` and of the block lists.
    block_size: Tuple[int, int] = (0, 0)
    #: Visible blocks of keys for each block of queries, int32: numbers (batch or 1, heads_q or 1, blocks of queries) and, with one
    #: more dimension, indices.
    block_counts: Any = None
    block_indices: Any = None
    #: uint8 or bool, (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1), or `Bits`; zero masks the pair.
    element_mask: Any = None
    #: int32, (n, 5): q_begin, q_end, k_begin, k_end and a kind (SLICE_FULL, ...). A pair in no slice is masked.
    slices: Any = None
    #: int32, (batch, seqlen_q, n) or, packed, (total_q, n): the rows of k that each query sees, in all its heads, and no others. Negative
    #: numbers, and those past the used rows, are none. Forward on the CPU, without other masks, bias, ALiBi, dropout and score.
    kv_indices: Any = None
    #: float32, (heads_q) or (batch, heads_q).
    alibi_slopes: Any = None
    #: r > 0 subtracts slope * log(1 + r * distance) instead of slope * distance; needs `alibi_slopes`.
    alibi_log_scale: float = 0.0
    #: float32, (heads_q): one more logit per head, in the denominator only.
    sink: Any = None
    dropout_p: float = 0.0
    #: A number, or an int64 tensor of one element that is read when the call runs, where the call runs.
    dropout_seed: Any = 0
    dropout_offset: int = 0
    #: Packed sequences: int32 or int64, (batch + 1).
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    #: int32, (batch): number of used rows of each sequence.
    seqused_q: Any = None
    seqused_k: Any = None
    #: int32, (batch): number of keys at the start of each sequence that are masked (left padding).
    seqstart_k: Any = None
    #: Paged keys: int32, (batch, max_pages).
    page_table: Any = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    #: Descales of float8 and int8 keys and values: float32, (batch, heads_k), or as k and v without head_dim.
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    num_splits: int = 0
    deterministic: bool = False
    batch_invariant: bool = False
    #: The bits of a row of the results do not depend on the other rows of the call, nor on how it stores its tensors. On the CPU.
    same_bits: bool = False
    #: fp32 operands are multiplied as they are, not as sums of bf16 numbers on tensor cores. Always so on the CPU.
    fp32_products: bool = False
    #: A score function of the context, from `Context.score`.
    score: Optional[Score] = None
    #: What it reads: up to 8 pairs of a tensor and its access, "any" or some letters of "bhij" (sequence, head, query, key).
    score_tensors: Sequence[Tuple[Any, str]] = ()
    #: Up to 8 numbers.
    score_scalars: Sequence[float] = ()


@dataclass(frozen=True)
class Bits:
    """An element mask of one bit per pair: `data` is uint8, (..., ceil(columns / 8)), and bit 0 of a byte is the first of its 8 keys.

    `numpy.packbits(mask, axis=-1, bitorder="little")` makes such data.
    """

    data: Any
    columns: int


def choose(table: dict, value: Any, what: str) -> int:
    try:
        return table[value]
    except (KeyError, TypeError):
        raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(map(repr, table))}") from None


_CAUSAL = {
    False: _abi.MASK_NONE,
    True: _abi.MASK_CAUSAL,
    "bottom_right": _abi.MASK_CAUSAL,
    "top_left": _abi.MASK_CAUSAL_TOP_LEFT,
}


def _set_causal(problem: _abi.fa_attention, value: Any, view: View) -> None:
    problem.mask = choose(_CAUSAL, value, "causal")


def _set_window(problem: _abi.fa_attention, value: Tuple[Optional[int], Optional[int]], view: View) -> None:
    left, right = value
    if left is not None:
        problem.window |= _abi.WINDOW_LEFT
        _abi.assign(problem, "window_left", left)
    if right is not None:
        problem.window |= _abi.WINDOW_RIGHT
        _abi.assign(problem, "window_right", right)


def _set_scale(problem: _abi.fa_attention, value: float, view: View) -> None:
    if value == 0:
        raise ValueError("scale is 0; it must be positive, or None for 1 / sqrt(head_dim)")
    problem.softmax_scale = value


def _set_block_size(problem: _abi.fa_attention, value: Tuple[int, int], view: View) -> None:
    _abi.assign(problem, "block_size_q", value[0])
    _abi.assign(problem, "block_size_k", value[1])


def _set_seed(problem: _abi.fa_attention, value: Any, view: View) -> None:
    if isinstance(value, int):
        _abi.assign(problem, "dropout_seed", value)
        return
    seed = view(value, "dropout_seed")
    if seed.dtype != _abi.INT64 or _tensor.shape_of(seed) not in ((), (1,)):
        raise TypeError(f"dropout_seed must be a number or one int64, not {_tensor.shape_of(seed)} of dtype {seed.dtype:#x}")
    problem.dropout_seed_ptr = seed.data


def _set_element_mask(problem: _abi.fa_attention, value: Any, view: View) -> None:
    if not isinstance(value, Bits):
        problem.element_mask = view(value, "element_mask")
        return
    mask = view(value.data, "element_mask")
    if mask.dtype != _abi.UINT8 or mask.ndim != 4:
        raise TypeError(f"the data of Bits must be uint8 with 4 dimensions, not {mask.ndim} of dtype {mask.dtype:#x}")
    if mask.shape[3] != (value.columns + 7) // 8:
        raise ValueError(f"{value.columns} columns of Bits need {(value.columns + 7) // 8} bytes; the data has {mask.shape[3]}")
    if mask.shape[3] > 1 and mask.stride[3] != 1:
        raise ValueError("the bytes of a row of Bits must be adjacent")
    mask.dtype = _abi.BIT
    for d in range(3):
        mask.stride[d] *= 8
    mask.shape[3], mask.stride[3] = value.columns, 1
    problem.element_mask = mask


def _set_flag(flag: int) -> Callable:
    def set_it(problem: _abi.fa_attention, value: bool, view: View) -> None:
        if value:
            problem.flags |= flag

    return set_it


def _set_tensor(name: str) -> Callable:
    return lambda problem, value, view: setattr(problem, name, view(value, name))


def _set_integer(name: str) -> Callable:
    return lambda problem, value, view: _abi.assign(problem, name, value)


def _set_float(name: str) -> Callable:
    return lambda problem, value, view: setattr(problem, name, value)


#: The options of several fields, or whose field has another name; those of the score function are set together.
_SPECIAL: Dict[str, Callable] = {
    "causal": _set_causal,
    "window": _set_window,
    "scale": _set_scale,
    "block_size": _set_block_size,
    "dropout_seed": _set_seed,
    "element_mask": _set_element_mask,
    "deterministic": _set_flag(_abi.FLAG_DETERMINISTIC),
    "batch_invariant": _set_flag(_abi.FLAG_BATCH_INVARIANT),
    "same_bits": _set_flag(_abi.FLAG_SAME_BITS),
    "fp32_products": _set_flag(_abi.FLAG_FP32_PRODUCTS),
}
_SCORE = {"score", "score_tensors", "score_scalars"}


def _setters() -> Dict[str, Callable]:
    setters = dict(_SPECIAL)
    kinds = {_abi.fa_tensor: _set_tensor, _abi.c_float: _set_float}
    for name, kind in _abi.fields_of(_abi.fa_attention):
        if name in Options.__dataclass_fields__ and name not in setters and name not in _SCORE:
            setters[name] = kinds.get(kind, _set_integer)(name)
    return setters


_SETTERS = _setters()


def set_options(problem: _abi.fa_attention, given: Dict[str, Any], view: View, holds: List[Any]) -> None:
    """Sets the fields of a problem that is zero but for its size. What must outlive the call is appended to `holds`."""
    for name, value in given.items():
        if name in _SETTERS:
            if value is not None:
                _SETTERS[name](problem, value, view)
        elif name not in _SCORE:
            raise TypeError(f"there is no option {name!r}; the options are {', '.join(Options.__dataclass_fields__)}")
    if not _SCORE.isdisjoint(given):
        score, tensors, scalars = given.get("score"), given.get("score_tensors", ()), given.get("score_scalars", ())
        set_score(problem, score, tensors, scalars, view, holds)


def problem_of(q: Any, k: Any, v: Any, options: Dict[str, Any], view: View, holds: List[Any]) -> _abi.fa_attention:
    """The problem without its outputs."""
    problem = _abi.fa_attention(ctypes.sizeof(_abi.fa_attention))  # all else is zero, as fa_attention_init leaves it
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None:
            raise TypeError(f"{name} must be given")
        setattr(problem, name, view(tensor, name))
    set_options(problem, options, view, holds)
    return problem
