# SPDX-License-Identifier: Apache-2.0
"""Host memory of this package's own, for results where there is no NumPy, or no NumPy dtype, to hold them. Every framework can take it:
`__dlpack__`, and `__array_interface__` where NumPy knows the dtype."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_char_p, c_int, c_void_p, py_object
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _abi
from ._dlpack import CAPSULE, CPU, VERSIONED_CAPSULE, DLManagedTensor, DLManagedTensorVersioned, python_function

# For __array_interface__, and for one element as `struct` reads it.
_TYPESTRS = {
    _abi.FLOAT32: "<f4",
    _abi.FLOAT16: "<f2",
    _abi.INT32: "<i4",
    _abi.INT64: "<i8",
    _abi.INT8: "|i1",
    _abi.UINT8: "|u1",
    _abi.BOOL: "|b1",
}
_CODES = {
    _abi.FLOAT32: "f",
    _abi.FLOAT16: "e",
    _abi.INT32: "i",
    _abi.INT64: "q",
    _abi.INT8: "b",
    _abi.UINT8: "B",
    _abi.BOOL: "?",
}

# What exported capsules point at, by the address of the managed tensor; its deleter takes it out.
_exports: Dict[int, Tuple[Any, ...]] = {}


@ctypes.CFUNCTYPE(None, c_void_p)
def _deleter(managed: int) -> None:
    _exports.pop(managed, None)


_is_valid = python_function("PyCapsule_IsValid", c_int, c_void_p, c_char_p)
_pointer = python_function("PyCapsule_GetPointer", c_void_p, c_void_p, c_char_p)
_new_capsule = python_function("PyCapsule_New", py_object, c_void_p, c_char_p, c_void_p)


@ctypes.CFUNCTYPE(None, c_void_p)
def _destructor(capsule: int) -> None:
    """Of a capsule that nobody consumed; a consumer renames it and calls the deleter itself."""
    for name in (CAPSULE, VERSIONED_CAPSULE):
        if _is_valid(capsule, name):
            _exports.pop(_pointer(capsule, name), None)


class Array:
    """A dense array in host memory."""

    def __init__(self, shape: Sequence[int], dtype: int) -> None:
        self.shape = tuple(shape)
        self.fa_dtype = dtype
        self._itemsize = (dtype >> 8 & 0xFF) // 8
        count = 1
        strides: List[int] = []
        for size in reversed(self.shape):
            strides.insert(0, count)
            count *= size
        self._strides = tuple(strides)  # in elements
        self._memory = (ctypes.c_uint8 * max(1, count * self._itemsize))()

    @property
    def __array_interface__(self) -> dict:
        if self.fa_dtype not in _TYPESTRS:
            raise AttributeError("NumPy has no dtype for this array; take it by DLPack")
        return {"version": 3, "shape": self.shape, "typestr": _TYPESTRS[self.fa_dtype], "data": (self._address(), False)}

    def _address(self) -> int:
        return ctypes.addressof(self._memory)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        if stream is not None:
            raise ValueError("host memory has no stream")
        if dl_device is not None and tuple(dl_device) != (CPU, 0):
            raise BufferError(f"this array lies in host memory, not on DLPack device {tuple(dl_device)}")
        if copy:
            raise BufferError("this array does not copy itself")
        versioned = max_version is not None and max_version[0] >= 1
        managed: Any = DLManagedTensorVersioned(version_major=1) if versioned else DLManagedTensor()
        ndim = len(self.shape)
        sizes, steps = (ctypes.c_int64 * max(1, ndim))(*self.shape), (ctypes.c_int64 * max(1, ndim))(*self._strides)
        tensor = managed.dl_tensor
        tensor.data, tensor.device_type, tensor.ndim = self._address(), CPU, ndim
        tensor.dtype_code, tensor.dtype_bits, tensor.dtype_lanes = self.fa_dtype & 0xFF, self.fa_dtype >> 8 & 0xFF, 1
        tensor.shape, tensor.strides = sizes, steps
        managed.deleter = ctypes.cast(_deleter, c_void_p).value
        address = ctypes.addressof(managed)
        _exports[address] = (self._memory, managed, sizes, steps)
        return _new_capsule(address, VERSIONED_CAPSULE if versioned else CAPSULE, ctypes.cast(_destructor, c_void_p))

    def __getitem__(self, index: Union[int, Tuple[int, ...]]) -> Union[int, float]:
        """One element, named by all its indices."""
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != len(self.shape) or not all(-size <= i < size for i, size in zip(indices, self.shape)):
            raise IndexError(f"{indices} names no element of an array of shape {self.shape}")
        place = sum((i % size) * step for i, size, step in zip(indices, self.shape, self._strides)) * self._itemsize
        raw = bytes(self._memory[place : place + self._itemsize])
        if self.fa_dtype == _abi.BFLOAT16:
            return struct.unpack("<f", b"\0\0" + raw)[0]
        return struct.unpack("<" + _CODES[self.fa_dtype], raw)[0]

    def __repr__(self) -> str:
        return f"flashattn.Array(shape={self.shape}, fa_dtype={self.fa_dtype:#x})"
