# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules made by hand: what no array library at hand exports."""

import array
import ctypes
import unittest

import flashattn
from flashattn import _dlpack

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Tensor:
    """An exporter of a bfloat16 tensor, (1, rows, 1, 2), that begins `skipped` elements into its memory."""

    def __init__(self, values, *, device=1, versioned=False, read_only=False, skipped=0, strides=True, code=4, version=1):
        self.memory = array.array("H", [0x7FC0] * skipped + [self.to_bits(value) for value in values])  # NaN, then the values
        rows = len(values) // 2
        self.shape = (ctypes.c_int64 * 4)(1, rows, 1, 2)
        self.strides = (ctypes.c_int64 * 4)(2 * rows, 2, 2, 1)
        self.managed = _dlpack.DLManagedTensorVersioned(version_major=version, flags=int(read_only))
        tensor = self.managed.dl_tensor
        tensor.data = self.memory.buffer_info()[0]
        tensor.device_type, tensor.ndim = device, 4
        tensor.dtype_code, tensor.dtype_bits, tensor.dtype_lanes = code, 16, 1
        tensor.shape, tensor.byte_offset = self.shape, 2 * skipped
        if strides:
            tensor.strides = self.strides
        self.versioned = versioned

    @staticmethod
    def to_bits(value):
        return int.from_bytes(array.array("f", [value]).tobytes(), "little") >> 16

    def values(self):
        return [array.array("f", (bits << 16).to_bytes(4, "little"))[0] for bits in self.memory]

    def __dlpack_device__(self):
        return (self.managed.dl_tensor.device_type, 0)

    def __dlpack__(self, **arguments):
        if self.versioned:
            return _new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)
        if arguments:
            raise TypeError("this exporter is older than its arguments")
        return _new_capsule(ctypes.addressof(self.managed.dl_tensor), b"dltensor", None)


def lse():
    return memoryview(array.array("f", [0.0] * 3)).cast("B").cast("f", (1, 1, 3))


class DLPackTest(unittest.TestCase):
    def forward(self, **how):
        q, k = Tensor([0.0] * 6), Tensor([0.5] * 6)
        v = Tensor([3.0, 1.0, 6.0, 1.0, 0.0, 1.0], **how)
        out = Tensor([-1.0] * 6, versioned=how.get("versioned", False))
        flashattn.forward(q, k, v, out=out, lse=lse())
        return out.values()

    def test_every_kind_of_capsule(self):
        for how in (
            {},
            {"versioned": True},
            {"skipped": 5},
            {"strides": False},
            {"versioned": True, "read_only": True},
            {"device": 3},
        ):
            with self.subTest(**how):
                self.assertEqual(self.forward(**how), [3.0, 1.0] * 3)

    def test_refusals(self):
        for how, words in (
            ({"device": 2}, "v lies on DLPack device 2"),
            ({"versioned": True, "version": 2}, "v comes as DLPack 2.0"),
        ):
            with self.subTest(**how), self.assertRaisesRegex(TypeError, words):
                self.forward(**how)
        with self.assertRaises(flashattn.Error) as caught:
            self.forward(code=5)  # complex
        self.assertEqual(caught.exception.name, "FA_ERROR_DTYPE")
        q = Tensor([0.0] * 6)
        with self.assertRaisesRegex(TypeError, "out is read-only"):
            flashattn.forward(q, q, q, out=Tensor([0.0] * 6, versioned=True, read_only=True), lse=lse())


if __name__ == "__main__":
    unittest.main()
