# SPDX-License-Identifier: Apache-2.0
"""The C ABI of flashattn_dist.h in ctypes, as `_abi` has that of flashattn.h. Structs of flashattn.h come from there."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

from ._abi import fa_attention, fa_gradients, lib

ERROR_TRANSPORT = 303

WAYS = {"auto": 0, "gather": 1, "ring": 2, "all_to_all": 3}
CONTIGUOUS = 1


class fa_dist_problem(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("lengths", c_void_p),
        ("num_documents", c_int64),
        ("heads_q", c_int64),
        ("heads_k", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("window", c_uint32),
        ("mask", c_int32),
        ("dtype", c_int32),
        ("num_ranks", c_int32),
        ("way", c_int32),
        ("num_stages", c_int32),
    ]


class fa_dist_piece(ctypes.Structure):
    _fields_ = [
        ("document", c_int64),
        ("row_begin", c_int64),
        ("row_end", c_int64),
        ("key_begin", c_int64),
        ("key_end", c_int64),
        ("local_row", c_int64),
        ("rank", c_int32),
        ("whole", c_int32),
    ]


class fa_dist_layout_info(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_ranks", c_int32),
        ("way", c_int32),
        ("num_stages", c_int32),
        ("total_rows", c_int64),
        ("num_pieces", c_int64),
        ("rank_offsets", POINTER(c_int64)),
        ("permutation", POINTER(c_int64)),
        ("inverse", POINTER(c_int64)),
        ("pieces", POINTER(fa_dist_piece)),
        ("work", POINTER(c_int64)),
        ("forward_bytes", POINTER(c_int64)),
        ("backward_bytes", POINTER(c_int64)),
        ("imbalance", c_double),
        ("reason", c_char * 320),
    ]


class fa_dist_message(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("peer", c_int32),
        ("receive", c_int32),
    ]


EXCHANGE_FN = CFUNCTYPE(c_int32, c_void_p, POINTER(fa_dist_message), c_int32, c_void_p)
WAIT_FN = CFUNCTYPE(c_int32, c_void_p, c_int64)
ABORT_FN = CFUNCTYPE(None, c_void_p)
STATUS_FN = CFUNCTYPE(c_int32, c_void_p)


class fa_dist_transport(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("reserved", c_uint32),
        ("user", c_void_p),
        ("exchange", EXCHANGE_FN),
        ("wait", WAIT_FN),
        ("abort", ABORT_FN),
        ("status", STATUS_FN),
    ]


class fa_dist_config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("transport", POINTER(fa_dist_transport)),
        ("timeout_ms", c_int64),
        ("nccl_library", c_void_p),
    ]


class fa_dist_info(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("status", c_int32),
        ("workspace_bytes", c_uint64),
        ("received_bytes", c_uint64),
        ("sent_bytes", c_uint64),
        ("num_stages", c_int32),
        ("num_launches", c_int32),
        ("reason", c_char * 320),
    ]


STRUCTS = (
    fa_dist_problem,
    fa_dist_piece,
    fa_dist_layout_info,
    fa_dist_message,
    fa_dist_transport,
    fa_dist_config,
    fa_dist_info,
)


def _declare() -> None:
    layout, dist, stream = c_void_p, c_void_p, c_void_p
    attention, gradients = POINTER(fa_attention), POINTER(fa_gradients)
    prototypes = {
        "fa_dist_problem_init": (c_int32, [POINTER(fa_dist_problem), c_size_t]),
        "fa_dist_plan": (c_int32, [POINTER(fa_dist_problem), POINTER(layout)]),
        "fa_dist_layout_destroy": (None, [layout]),
        "fa_dist_layout_info_init": (c_int32, [POINTER(fa_dist_layout_info), c_size_t]),
        "fa_dist_layout_describe": (c_int32, [layout, POINTER(fa_dist_layout_info)]),
        "fa_dist_transport_init": (c_int32, [POINTER(fa_dist_transport), c_size_t]),
        "fa_dist_config_init": (c_int32, [POINTER(fa_dist_config), c_size_t]),
        "fa_dist_create": (c_int32, [POINTER(dist), c_void_p, c_void_p, POINTER(fa_dist_config)]),
        "fa_dist_destroy": (None, [dist]),
        "fa_dist_info_init": (c_int32, [POINTER(fa_dist_info), c_size_t]),
        "fa_dist_query": (c_int32, [dist, layout, attention, gradients, POINTER(fa_dist_info)]),
        "fa_dist_prepare": (c_int32, [dist, layout, attention, gradients]),
        "fa_dist_forward": (c_int32, [dist, layout, attention, c_void_p, c_size_t, stream]),
        "fa_dist_backward": (c_int32, [dist, layout, attention, gradients, c_void_p, c_size_t, stream]),
        "fa_dist_decode": (c_int32, [dist, attention, c_void_p, c_size_t, stream]),
        "fa_dist_decode_query": (c_int32, [dist, attention, POINTER(fa_dist_info)]),
        "fa_dist_decode_prepare": (c_int32, [dist, attention]),
        "fa_dist_status": (c_int32, [dist]),
        "fa_dist_abort": (c_int32, [dist]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments


_declare()
