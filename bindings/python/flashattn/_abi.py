# SPDX-License-Identifier: Apache-2.0
"""The C ABI of flashattn.h in ctypes: constants, struct layouts, prototypes, and the library itself.

This is the only module that knows where the library is and what its memory looks like. Field names and order are those of the
header; the tests compare every offset with a C compiler's.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from struct import Struct
from typing import Dict, List, Sequence, Tuple

OK = 0
ERROR_INVALID_ARGUMENT = 100

DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA = 0, 1, 2
CPU_ISAS: Dict[str, int] = {
    "auto": 0, "portable": 100, "avx2": 200, "avx512": 300, "avx512_bf16": 350, "amx": 400, "neon": 500,
    "neon_fhm": 525, "neon_bf16": 550, "sve256": 600,
}
MASK_NONE, MASK_CAUSAL, MASK_CAUSAL_TOP_LEFT = 0, 1, 2
WINDOW_LEFT, WINDOW_RIGHT = 1, 2
SLICE_FULL, SLICE_CAUSAL, SLICE_INVERSE_CAUSAL, SLICE_BOTH_CAUSAL = 0, 1, 2, 3
FLAG_DETERMINISTIC, FLAG_BATCH_INVARIANT, FLAG_SAME_BITS, FLAG_FP32_PRODUCTS = 1, 2, 4, 8
APPEND_INTERLEAVED = 1
SCORE_BY_BATCH, SCORE_BY_HEAD, SCORE_BY_QUERY, SCORE_BY_KEY, SCORE_BY_ANY = 1, 2, 4, 8, 16
SCORE_TILE_PARTIAL, SCORE_TILE_EMPTY, SCORE_TILE_FULL = 0, 1, 2

FLOAT32 = 0x00012002
FLOAT16 = 0x00011002
BFLOAT16 = 0x00011004
FLOAT8_E4M3 = 0x0001080A
INT8 = 0x00010800
INT32 = 0x00012000
INT64 = 0x00014000
UINT8 = 0x00010801
BOOL = 0x00010806
BIT = 0x00010106

TASK_FN = CFUNCTYPE(None, c_void_p, c_int32)
PARALLEL_FOR_FN = CFUNCTYPE(None, c_void_p, c_int32, TASK_FN, c_void_p)
LOG_FN = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)


class fa_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("num_threads", c_int32),
        ("cpu_isa", c_int32),
        ("cuda_arch", c_int32),
        ("parallel_for", PARALLEL_FOR_FN),
        ("parallel_for_user", c_void_p),
        ("log", LOG_FN),
        ("log_user", c_void_p),
        ("kernel_cache", c_char_p),
    ]


class fa_device_properties(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("num_threads", c_int32),
        ("cpu_isa", c_int32),
        ("compute_capability", c_int32),
        ("multiprocessors", c_int32),
        ("reserved", c_int32),
        ("memory_bytes", c_uint64),
        ("name", c_char * 128),
    ]


class fa_tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("shape", c_int64 * 4),
        ("stride", c_int64 * 4),
        ("dtype", c_int32),
        ("ndim", c_int32),
    ]


class fa_attention(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("q", fa_tensor),
        ("k", fa_tensor),
        ("v", fa_tensor),
        ("out", fa_tensor),
        ("lse", fa_tensor),
        ("cu_seqlens_q", fa_tensor),
        ("cu_seqlens_k", fa_tensor),
        ("seqused_q", fa_tensor),
        ("seqused_k", fa_tensor),
        ("page_table", fa_tensor),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_k", c_int64),
        ("mask", c_int32),
        ("window", c_uint32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("bias", fa_tensor),
        ("block_mask", fa_tensor),
        ("block_size_q", c_int64),
        ("block_size_k", c_int64),
        ("alibi_slopes", fa_tensor),
        ("sink", fa_tensor),
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("dropout_p", c_float),
        ("num_splits", c_int32),
        ("dropout_seed", c_uint64),
        ("dropout_offset", c_uint64),
        ("dropout_seed_ptr", c_void_p),
        ("dropout_offset_ptr", c_void_p),
        ("q_descale", fa_tensor),
        ("k_descale", fa_tensor),
        ("v_descale", fa_tensor),
        ("alibi_log_scale", c_float),
        ("reserved", c_uint32),
        ("element_mask", fa_tensor),
        ("seqstart_k", fa_tensor),
        ("slices", fa_tensor),
        ("block_counts", fa_tensor),
        ("block_indices", fa_tensor),
        ("max_logit", fa_tensor),
        ("score", c_void_p),
        ("score_tensors", c_void_p),
        ("num_score_tensors", c_int32),
        ("score_reserved", c_uint32),
        ("score_scalars", c_float * 8),
        ("kv_indices", fa_tensor),
    ]


class fa_gradients(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("dout", fa_tensor),
        ("dlse", fa_tensor),
        ("dq", fa_tensor),
        ("dk", fa_tensor),
        ("dv", fa_tensor),
        ("dbias", fa_tensor),
        ("dsink", fa_tensor),
    ]


class fa_jvp(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("tq", fa_tensor),
        ("tk", fa_tensor),
        ("tv", fa_tensor),
        ("tout", fa_tensor),
        ("tlse", fa_tensor),
    ]


class fa_plan_info(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("status", c_int32),
        ("workspace_bytes", c_uint64),
        ("flops", c_double),
        ("bytes", c_double),
        ("num_splits", c_int32),
        ("same_bits_contract", c_int32),
        ("kernel", c_char * 64),
        ("reason", c_char * 320),
    ]


class fa_append(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("k", fa_tensor),
        ("v", fa_tensor),
        ("k_cache", fa_tensor),
        ("v_cache", fa_tensor),
        ("page_table", fa_tensor),
        ("offsets", fa_tensor),
        ("cu_seqlens", fa_tensor),
        ("seqused", fa_tensor),
        ("seqused_k", fa_tensor),
        ("q", fa_tensor),
        ("q_out", fa_tensor),
        ("rotary_cos", fa_tensor),
        ("rotary_sin", fa_tensor),
        ("rotary_positions", fa_tensor),
        ("k_descale", fa_tensor),
        ("v_descale", fa_tensor),
    ]


class fa_merge_problem(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_parts", c_int32),
        ("out_parts", c_void_p),
        ("lse_parts", c_void_p),
        ("out", fa_tensor),
        ("lse", fa_tensor),
    ]


class fa_score_position(ctypes.Structure):
    _fields_ = [
        ("b", c_int64),
        ("h", c_int64),
        ("i", c_int64),
        ("j", c_int64),
        ("s_q", c_int64),
        ("s_k", c_int64),
        ("start_q", c_int64),
        ("start_k", c_int64),
    ]


class fa_score_aux(ctypes.Structure):
    _fields_ = [
        ("tensors", c_void_p),
        ("user", c_void_p),
        ("scalars", c_float * 8),
        ("num_tensors", c_int32),
        ("reserved", c_int32),
    ]


class fa_score_tensor(ctypes.Structure):
    _fields_ = [
        ("tensor", fa_tensor),
        ("access", c_uint32),
        ("reserved", c_uint32),
    ]


class fa_score_source(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("text", c_void_p),
        ("text_length", c_uint64),
        ("score", c_void_p),
        ("derivative", c_void_p),
        ("visible", c_void_p),
        ("tile", c_void_p),
        ("run", c_void_p),
        ("run_backward", c_void_p),
        ("run_visible", c_void_p),
        ("user", c_void_p),
    ]


SCORE_FN = CFUNCTYPE(c_float, c_float, POINTER(fa_score_position), POINTER(fa_score_aux))
SCORE_VISIBLE_FN = CFUNCTYPE(c_int32, POINTER(fa_score_position), POINTER(fa_score_aux))
SCORE_TILE_FN = CFUNCTYPE(c_int32, POINTER(fa_score_position), c_int64, c_int64, POINTER(fa_score_aux))


# An fa_tensor's bytes, by its number of dimensions.
_TENSOR_BYTES = [Struct(f"=Q{ndim}q{8 * (4 - ndim)}x{ndim}q{8 * (4 - ndim)}xii") for ndim in range(5)]


def make_tensor(address: int, shape: Sequence[int], strides: Sequence[int], dtype: int) -> fa_tensor:
    """An fa_tensor of at most 4 dimensions, from its bytes: filling the arrays by ctypes takes four times as long."""
    ndim = len(shape)
    return fa_tensor.from_buffer_copy(_TENSOR_BYTES[ndim].pack(address, *shape, *strides, dtype, ndim))


def fields_of(struct: type) -> List[Tuple[str, type]]:
    return [(field[0], field[1]) for field in getattr(struct, "_fields_")]


# By fa_struct_kind.
STRUCTS = {
    1: fa_config,
    2: fa_device_properties,
    3: fa_tensor,
    4: fa_attention,
    5: fa_gradients,
    6: fa_plan_info,
    7: fa_append,
    8: fa_merge_problem,
    9: fa_score_source,
    10: fa_score_tensor,
    11: fa_jvp,
}


def assign(struct: ctypes.Structure, field: str, value: int) -> None:
    """Sets an integer field; ctypes alone would drop the bits that do not fit."""
    setattr(struct, field, value)
    if getattr(struct, field) != value:
        raise OverflowError(f"{field} is {value}, which does not fit the library's field")


def _candidates() -> List[str]:
    """Where the library may be, best first. An explicit choice is the only candidate."""
    chosen = os.environ.get("FLASHATTN_LIBRARY")
    if chosen:
        return [chosen]
    here = os.path.dirname(os.path.abspath(__file__))
    names = ["libflashattn.so.0", "libflashattn.so"]
    found = [os.path.join(here, name) for name in names if os.path.exists(os.path.join(here, name))]
    system = ctypes.util.find_library("flashattn")
    return found + ["libflashattn.so.0"] + ([system] if system else [])


def _load() -> ctypes.CDLL:
    failures = []
    for path in _candidates():
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            failures.append(str(error))
            continue
        if hasattr(loaded, "fa_sizeof"):
            return loaded
        failures.append(f"{path}: another library of the same name, without fa_sizeof")
    raise ImportError("libflashattn cannot be loaded (set FLASHATTN_LIBRARY to its path): " + "; ".join(failures))


def _declare(loaded: ctypes.CDLL) -> None:
    context, stream, tensor = c_void_p, c_void_p, POINTER(fa_tensor)
    attention, gradients, plan = POINTER(fa_attention), POINTER(fa_gradients), POINTER(fa_plan_info)
    append, merge, jvp = POINTER(fa_append), POINTER(fa_merge_problem), POINTER(fa_jvp)
    prototypes = {
        "fa_status_name": (c_char_p, [c_int32]),
        "fa_status_description": (c_char_p, [c_int32]),
        "fa_version": (c_int32, []),
        "fa_version_string": (c_char_p, []),
        "fa_build_info": (c_char_p, []),
        "fa_config_init": (c_int32, [POINTER(fa_config), c_size_t]),
        "fa_create": (c_int32, [POINTER(c_void_p), POINTER(fa_config)]),
        "fa_destroy": (None, [context]),
        "fa_last_error": (c_char_p, [context]),
        "fa_last_cuda_error": (c_int32, [context]),
        "fa_device_properties_init": (c_int32, [POINTER(fa_device_properties), c_size_t]),
        "fa_device_info": (c_int32, [context, POINTER(fa_device_properties)]),
        "fa_tensor_from_dlpack": (c_int32, [tensor, c_void_p]),
        "fa_attention_init": (c_int32, [attention, c_size_t]),
        "fa_gradients_init": (c_int32, [gradients, c_size_t]),
        "fa_jvp_init": (c_int32, [jvp, c_size_t]),
        "fa_append_init": (c_int32, [append, c_size_t]),
        "fa_merge_problem_init": (c_int32, [merge, c_size_t]),
        "fa_plan_info_init": (c_int32, [plan, c_size_t]),
        "fa_forward_query": (c_int32, [context, attention, plan]),
        "fa_backward_query": (c_int32, [context, attention, gradients, plan]),
        "fa_forward_jvp_query": (c_int32, [context, attention, jvp, plan]),
        "fa_merge_query": (c_int32, [context, merge, plan]),
        "fa_append_query": (c_int32, [context, append, plan]),
        "fa_forward_prepare": (c_int32, [context, attention]),
        "fa_backward_prepare": (c_int32, [context, attention, gradients]),
        "fa_forward_jvp_prepare": (c_int32, [context, attention, jvp]),
        "fa_merge_prepare": (c_int32, [context, merge]),
        "fa_append_prepare": (c_int32, [context, append]),
        "fa_forward": (c_int32, [context, attention, c_void_p, c_size_t, stream]),
        "fa_backward": (c_int32, [context, attention, gradients, c_void_p, c_size_t, stream]),
        "fa_forward_jvp": (c_int32, [context, attention, jvp, c_void_p, c_size_t, stream]),
        "fa_merge": (c_int32, [context, merge, c_void_p, c_size_t, stream]),
        "fa_append_kv": (c_int32, [context, append, c_void_p, c_size_t, stream]),
        "fa_score_source_init": (c_int32, [POINTER(fa_score_source), c_size_t]),
        "fa_score_create": (c_int32, [context, POINTER(fa_score_source), POINTER(c_void_p)]),
        "fa_score_destroy": (None, [c_void_p]),
        "fa_sizeof": (c_size_t, [c_int32]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments


def _check_sizes(loaded: ctypes.CDLL) -> None:
    """A tensor is never versioned; the other structs only grow, and a library older than this module would refuse ours."""
    for kind, struct in STRUCTS.items():
        ours, theirs = ctypes.sizeof(struct), loaded.fa_sizeof(kind)
        if theirs < ours or (struct in (fa_tensor, fa_score_tensor) and theirs != ours):
            raise ImportError(
                f"libflashattn {loaded.fa_version_string().decode()} does not match this package: "
                f"{struct.__name__} has {theirs} bytes there and {ours} here"
            )


lib = _load()
_declare(lib)
_check_sizes(lib)
