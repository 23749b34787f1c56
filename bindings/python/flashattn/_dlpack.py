# SPDX-License-Identifier: Apache-2.0
"""DLPack's structs and numbers, and functions of Python's C API."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

CPU = 1
HOST_DEVICES = {CPU: "cpu", 3: "cuda_host"}
CUDA_DEVICES = {2: "cuda", 13: "cuda_managed"}
CAPSULE, VERSIONED_CAPSULE = b"dltensor", b"dltensor_versioned"
READ_ONLY_FLAG = 1


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("dtype_code", c_uint8),
        ("dtype_bits", c_uint8),
        ("dtype_lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("version_major", c_uint32),
        ("version_minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("dl_tensor", DLTensor),
    ]


def python_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python's C API, with types of its own: those of ctypes.pythonapi are shared by the process, and other packages set them."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
