# SPDX-License-Identifier: Apache-2.0
"""Python objects as `fa_tensor` views, without copying: `__array_interface__` (NumPy), `__dlpack__` (PyTorch, JAX, CuPy, ...),
`__cuda_array_interface__` (Numba, ...) and the buffer protocol (memoryview, array, ctypes). And room for results, made by the framework
the queries come from.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from ctypes import (
    POINTER,
    c_char_p,
    c_int,
    c_ssize_t,
    c_void_p,
    py_object,
)
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import _abi, _cuda
from ._array import Array
from ._dlpack import (
    CAPSULE,
    CUDA_DEVICES,
    HOST_DEVICES,
    READ_ONLY_FLAG,
    VERSIONED_CAPSULE,
    DLManagedTensorVersioned,
    python_function,
)
from ._error import check


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


numpy = _optional("numpy")
ml_dtypes = numpy and _optional("ml_dtypes")

_BY_TYPESTR = {
    "f4": _abi.FLOAT32,
    "f2": _abi.FLOAT16,
    "i1": _abi.INT8,
    "i4": _abi.INT32,
    "i8": _abi.INT64,
    "u1": _abi.UINT8,
    "b1": _abi.BOOL,
}
# Extension types of NumPy, which `__array_interface__` can only call raw bytes ("V2").
_BY_DTYPE_NAME = {"bfloat16": _abi.BFLOAT16, "float8_e4m3fn": _abi.FLOAT8_E4M3}
_BY_FORMAT = {
    "f": _abi.FLOAT32,
    "e": _abi.FLOAT16,
    "b": _abi.INT8,
    "i": _abi.INT32,
    "q": _abi.INT64,
    "l": _abi.INT64,
    "B": _abi.UINT8,
    "?": _abi.BOOL,
}
_NAMES = {
    _abi.FLOAT32: "float32",
    _abi.FLOAT16: "float16",
    _abi.BFLOAT16: "bfloat16",
    _abi.FLOAT8_E4M3: "float8_e4m3fn",
    _abi.INT8: "int8",
    _abi.INT32: "int32",
    _abi.INT64: "int64",
    _abi.UINT8: "uint8",
    _abi.BOOL: "bool",
}

Holds = List[Any]  # what must stay alive as long as a view is used


def itemsize(dtype: int) -> int:
    return (dtype >> 8 & 0xFF) // 8


def _fill(address: int, shape: Sequence[int], byte_strides: Optional[Sequence[int]], dtype: int, what: str) -> _abi.fa_tensor:
    if len(shape) > 4:
        raise TypeError(f"{what} has {len(shape)} dimensions; at most 4 are possible")
    size = itemsize(dtype)
    if byte_strides is None:
        strides, step = [], 1
        for count in reversed(shape):
            strides.append(step)
            step *= count
        strides.reverse()
    else:
        strides = [stride // size for stride in byte_strides]
        for count, stride in zip(shape, byte_strides):
            if stride % size != 0 and count > 1:
                raise TypeError(f"{what} has a stride of {stride} bytes, which is no multiple of its element's {size}")
    return _abi.make_tensor(address, shape, strides, dtype)


# --------------------------------------------------------------------------------------------------- __array_interface__


@functools.lru_cache(maxsize=64)  # NumPy takes microseconds to name a dtype
def _dtype_of(typestr: str, dtype: Any) -> Optional[int]:
    """The fa_dtype of an array with this interface and, where it is NumPy's, this `dtype`; None if the library has none."""
    if typestr[0] == ">":
        return None
    return _BY_DTYPE_NAME.get(getattr(dtype, "name", "")) or _BY_TYPESTR.get(typestr[1:])


def _from_array_interface(obj: Any, interface: dict, what: str, writable: bool) -> _abi.fa_tensor:
    address, read_only = interface["data"]
    if writable and read_only:
        raise TypeError(f"{what} is read-only")
    typestr, its_dtype = interface["typestr"], getattr(obj, "dtype", None)
    dtype = _dtype_of(typestr, its_dtype)
    if dtype is None:
        raise TypeError(f"{what} has dtype {getattr(its_dtype, 'name', typestr)}, which the library does not know")
    return _fill(address, interface["shape"], interface.get("strides"), dtype, what)


# ---------------------------------------------------------------------------------------------- __cuda_array_interface__


def _from_cuda_array_interface(obj: Any, interface: dict, what: str, writable: bool, stream: Optional[int]) -> _abi.fa_tensor:
    if interface.get("mask") is not None:
        raise TypeError(f"{what} has a mask, which the library does not know")
    # Version 3: the exporter's pending work is on this stream; None says there is none to wait for.
    producer = interface.get("stream")
    if producer is not None and producer != (stream or _cuda.LEGACY_STREAM):
        _cuda.wait(stream or _cuda.LEGACY_STREAM, producer)
    return _from_array_interface(obj, interface, what, writable)


def stream_handle(stream: Any) -> Optional[int]:
    """The address of a CUDA stream: a number, `__cuda_stream__` (the protocol), PyTorch's `cuda_stream`, CuPy's `ptr`."""
    if stream is None or isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise TypeError(f"stream follows version {version} of __cuda_stream__; this package knows version 0")
        return int(handle)
    for name in ("cuda_stream", "ptr"):
        if isinstance(getattr(stream, name, None), int):
            return getattr(stream, name)
    raise TypeError(f"stream is a {type(stream).__name__}; it must be an address or have __cuda_stream__, cuda_stream or ptr")


# ------------------------------------------------------------------------------------------------------------ PyTorch


@functools.lru_cache(maxsize=None)
def dtypes_of_torch(torch: Any) -> Dict[Any, int]:
    return {getattr(torch, name): dtype for dtype, name in _NAMES.items() if hasattr(torch, name)}


def _from_torch(obj: Any, torch: Any) -> Optional[_abi.fa_tensor]:
    """A plain tensor in host memory, read without the capsule of DLPack, which takes PyTorch several times as long to make as this takes.

    None for all others: DLPack knows them, or says why it does not.
    """
    if type(obj) is not torch.Tensor or not obj.is_cpu or obj.requires_grad or obj.layout is not torch.strided:
        return None
    shape, dtype = obj.shape, dtypes_of_torch(torch).get(obj.dtype)
    if dtype is None or len(shape) > 4:
        return None
    return _abi.make_tensor(obj.data_ptr(), shape, obj.stride(), dtype)


# ------------------------------------------------------------------------------------------------------------- DLPack


_capsule_is_valid = python_function("PyCapsule_IsValid", c_int, py_object, c_char_p)
_capsule_pointer = python_function("PyCapsule_GetPointer", c_void_p, py_object, c_char_p)


def _capsule(obj: Any, arguments: dict) -> Any:
    try:
        return obj.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # an exporter from before DLPack 1.0
        return obj.__dlpack__(**arguments)


def _from_dlpack(obj: Any, what: str, writable: bool, device: int, stream: Optional[int], holds: Holds) -> _abi.fa_tensor:
    kind, _ = obj.__dlpack_device__()
    expected = CUDA_DEVICES if device == _abi.DEVICE_CUDA else HOST_DEVICES
    if kind not in expected:
        raise TypeError(f"{what} lies on DLPack device {int(kind)}; this context needs one of {sorted(expected)}")
    # The exporter makes its pending work visible to the stream the call will run on; 1 is the legacy default stream.
    arguments = {} if device != _abi.DEVICE_CUDA else {"stream": stream if stream else 1}
    # The capsule is not consumed: it stays alive until the call is over and then frees itself.
    capsule = _capsule(obj, arguments)
    holds.append(capsule)
    if _capsule_is_valid(capsule, VERSIONED_CAPSULE):
        managed = DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, VERSIONED_CAPSULE))
        if managed.version_major != 1:
            raise TypeError(f"{what} comes as DLPack {managed.version_major}.{managed.version_minor}; this package reads 1.x")
        if writable and managed.flags & READ_ONLY_FLAG:
            raise TypeError(f"{what} is read-only")
        address = ctypes.addressof(managed) + DLManagedTensorVersioned.dl_tensor.offset
    elif _capsule_is_valid(capsule, CAPSULE):
        address = _capsule_pointer(capsule, CAPSULE)  # a DLManagedTensor begins with its DLTensor
    else:
        raise TypeError(f"{what}.__dlpack__() did not return a DLPack capsule")
    tensor = _abi.fa_tensor()
    check(_abi.lib.fa_tensor_from_dlpack(ctypes.byref(tensor), address))
    return tensor


# ------------------------------------------------------------------------------------------------------ buffer protocol


class _Py_buffer(ctypes.Structure):
    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", POINTER(c_ssize_t)),
        ("strides", POINTER(c_ssize_t)),
        ("suboffsets", POINTER(c_ssize_t)),
        ("internal", c_void_p),
    ]


_PyBUF_FULL_RO = 0x0100 | 0x0018 | 0x0004  # INDIRECT | STRIDES | FORMAT
_get_buffer = python_function("PyObject_GetBuffer", c_int, py_object, POINTER(_Py_buffer), c_int)
_release_buffer = python_function("PyBuffer_Release", None, POINTER(_Py_buffer))


class _HeldBuffer:
    """Keeps an exported buffer locked, so that e.g. a bytearray cannot be resized under the call."""

    def __init__(self, obj: Any) -> None:
        self.view = _Py_buffer()
        self.held = False
        _get_buffer(obj, ctypes.byref(self.view), _PyBUF_FULL_RO)  # raises by itself
        self.held = True

    def __del__(self) -> None:
        if self.held:
            _release_buffer(ctypes.byref(self.view))


def _from_buffer(obj: Any, what: str, writable: bool, holds: Holds) -> _abi.fa_tensor:
    held = _HeldBuffer(obj)
    holds.append(held)
    view = held.view
    if writable and view.readonly:
        raise TypeError(f"{what} is read-only")
    format = (view.format or b"B").decode()
    dtype = _BY_FORMAT.get(format.lstrip("@=<"))
    if dtype is None or itemsize(dtype) != view.itemsize or view.suboffsets:
        raise TypeError(f"{what} is a buffer of format {format!r}, which the library does not know")
    strides = [view.strides[d] for d in range(view.ndim)] if view.strides else None
    return _fill(view.buf or 0, [view.shape[d] for d in range(view.ndim)], strides, dtype, what)


# ----------------------------------------------------------------------------------------------------------------- views


def view(
    obj: Any, what: str, device: int, holds: Holds, *, writable: bool = False, stream: Optional[int] = None
) -> _abi.fa_tensor:
    """Describes `obj`, called `what` in messages, as the library sees it; None is an absent tensor.

    Whatever must outlive the call is appended to `holds`.
    """
    if obj is None:
        return _abi.fa_tensor()
    holds.append(obj)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        if obj.is_neg():
            raise TypeError(
                f"{what} is the negative of what its memory holds (is_neg), which DLPack does not say; give resolve_neg() of it"
            )
        tensor = _from_torch(obj, torch) if device == _abi.DEVICE_CPU else None
        if tensor is not None:
            return tensor
    interface = getattr(obj, "__array_interface__", None)
    if interface is not None and device == _abi.DEVICE_CPU:
        return _from_array_interface(obj, interface, what, writable)
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj, what, writable, device, stream, holds)
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is not None and device == _abi.DEVICE_CUDA:
        return _from_cuda_array_interface(obj, interface, what, writable, stream)
    if device == _abi.DEVICE_CPU:
        try:
            return _from_buffer(obj, what, writable, holds)
        except (BufferError, TypeError) as error:
            raise TypeError(f"{what}: cannot view a {type(obj).__name__} as a tensor ({error})") from None
    raise TypeError(
        f"{what}: cannot view a {type(obj).__name__} as a tensor of the GPU; it needs __dlpack__ or __cuda_array_interface__"
    )


def shape_of(tensor: _abi.fa_tensor) -> Tuple[int, ...]:
    return tuple(tensor.shape[: tensor.ndim])


def _framework(like: Any) -> Any:
    """The module of an object that brings its own allocator, and can be written in place."""
    for name, kind in (("torch", "Tensor"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(like, getattr(module, kind)):
            return module
    return None


def allocate(shape: Sequence[int], dtype: int, what: str, device: int, like: Any, *, zeroed: bool) -> Any:
    """A new array where `like` lies, made by its framework; else by NumPy; else an `Array`."""
    module = _framework(like)
    if module is not None and (module.__name__ == "torch" or dtype != _abi.BFLOAT16):
        make = module.zeros if zeroed else module.empty
        place = {"device": like.device} if module.__name__ == "torch" else {}
        return make(tuple(shape), dtype=getattr(module, _NAMES[dtype]), **place)
    if device != _abi.DEVICE_CPU:
        raise TypeError(
            f"{what} must be given: a {type(like).__name__} brings no allocator of GPU memory that this package knows"
        )
    if numpy is not None and (dtype != _abi.BFLOAT16 or ml_dtypes is not None):
        name: Any = ml_dtypes.bfloat16 if dtype == _abi.BFLOAT16 else _NAMES[dtype]
        return (numpy.zeros if zeroed else numpy.empty)(shape, name)
    return Array(shape, dtype)
