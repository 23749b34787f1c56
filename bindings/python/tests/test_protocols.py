# SPDX-License-Identifier: Apache-2.0
"""What needs no framework: the package's own arrays going out by DLPack, CUDA arrays and streams coming in.

FLASHATTN_FAKE_DRIVER names a folder with a libcuda.so.1 that only writes down its calls, so that the order of streams can be seen
without a GPU.
"""

import array
import ctypes
import gc
import math
import os
import subprocess
import sys
import unittest

import flashattn
from flashattn import _abi, _array, _dlpack, _tensor

try:
    import numpy as np
except ImportError:
    np = None


def buffer(*shape):
    return memoryview(array.array("f", [0.5] * math.prod(shape))).cast("B").cast("f", shape)


class ArrayTest(unittest.TestCase):
    def test_the_library_takes_it(self):
        q, out = buffer(1, 3, 1, 2), flashattn.Array((1, 3, 1, 2), _abi.FLOAT32)
        lse = flashattn.Array((1, 1, 3), _abi.FLOAT32)
        flashattn.forward(q, q, q, out=out, lse=lse)
        self.assertAlmostEqual(out[0, 2, 0, 1], 0.5, places=6)
        again, _ = flashattn.forward(out, q, out)  # and as input
        self.assertEqual(again.shape, (1, 3, 1, 2))

    def test_every_dtype(self):
        for dtype, pattern, value in (
            (_abi.FLOAT32, b"\0\0\xc0\x3f", 1.5),
            (_abi.FLOAT16, b"\0\x3e", 1.5),
            (_abi.BFLOAT16, b"\xc0\x3f", 1.5),
            (_abi.INT32, b"\xff\xff\xff\xff", -1),
            (_abi.INT64, b"\2\0\0\0\0\0\0\0", 2),
            (_abi.INT8, b"\xff", -1),
            (_abi.UINT8, b"\xff", 255),
            (_abi.BOOL, b"\1", True),
        ):
            own = flashattn.Array((2, 2), dtype)
            view = _tensor.view(own, "own", _abi.DEVICE_CPU, [])
            self.assertEqual((view.dtype, view.ndim, list(view.shape[:2]), list(view.stride[:2])), (dtype, 2, [2, 2], [2, 1]))
            ctypes.memmove(view.data + 3 * len(pattern), pattern, len(pattern))
            self.assertEqual((own[1, 1], own[-1, -1], own[0, 0]), (value, value, 0))
        for wrong in ((0,), (2, 0), (0, -3)):
            with self.assertRaises(IndexError):
                own[wrong]

    def test_capsules_keep_the_memory(self):
        before = len(_array._exports)
        for version in (None, (1, 0)):
            own = flashattn.Array((2,), _abi.FLOAT32)
            capsule = own.__dlpack__(max_version=version)
            self.assertEqual(len(_array._exports), before + 1)
            del own, capsule  # nobody consumed it
            gc.collect()
            self.assertEqual(len(_array._exports), before)
        own = flashattn.Array((2,), _abi.FLOAT32)
        capsule = own.__dlpack__()
        managed = _dlpack.DLManagedTensor.from_address(_tensor._capsule_pointer(capsule, b"dltensor"))
        # A consumer renames the capsule and calls the deleter when it is done.
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        name = b"used_dltensor"
        rename(capsule, name)
        address = ctypes.addressof(managed)
        del own, capsule
        gc.collect()
        self.assertEqual(len(_array._exports), before + 1)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(address)
        self.assertEqual(len(_array._exports), before)

    def test_what_it_cannot_export(self):
        own = flashattn.Array((2,), _abi.FLOAT32)
        with self.assertRaises(ValueError):
            own.__dlpack__(stream=1)
        for arguments in ({"dl_device": (2, 0)}, {"copy": True}):
            with self.assertRaises(BufferError):
                own.__dlpack__(**arguments)
        self.assertFalse(hasattr(flashattn.Array((2,), _abi.BFLOAT16), "__array_interface__"))

    @unittest.skipUnless(np, "NumPy is not installed")
    def test_numpy_takes_it(self):
        own = flashattn.Array((2, 3), _abi.FLOAT16)
        np.asarray(own)[1, 2] = 2
        self.assertEqual(own[1, 2], 2)
        if hasattr(np, "from_dlpack"):  # NumPy 1.23
            self.assertEqual(np.from_dlpack(own).tolist(), [[0, 0, 0], [0, 0, 2]])


class CudaArray:
    """What Numba and others show of GPU memory."""

    def __init__(self, stream=None, **changes):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (1, 8, 2, 64),
            "typestr": "<f2",
            "data": (0x7F0000000000, False),
            "strides": None,
            "stream": stream,
            **changes,
        }


class CudaTest(unittest.TestCase):
    def view(self, obj, **how):
        return _tensor.view(obj, "q", _abi.DEVICE_CUDA, [], **how)

    def test_cuda_array_interface(self):
        view = self.view(CudaArray())
        self.assertEqual((view.data, view.dtype, view.ndim), (0x7F0000000000, _abi.FLOAT16, 4))
        self.assertEqual((list(view.shape), list(view.stride)), ([1, 8, 2, 64], [1024, 128, 64, 1]))
        view = self.view(CudaArray(strides=(4096, 512, 256, 2)))
        self.assertEqual(list(view.stride), [2048, 256, 128, 1])
        self.view(CudaArray(stream=1))  # the default stream, on which the call runs
        self.view(CudaArray(stream=77), stream=77)
        for array_, words in (
            (CudaArray(mask=CudaArray()), "q has a mask"),
            (CudaArray(typestr="<f8"), "q has dtype <f8"),
            (object(), "needs __dlpack__ or __cuda_array_interface__"),
        ):
            with self.assertRaisesRegex(TypeError, words):
                self.view(array_)
        with self.assertRaisesRegex(TypeError, "q is read-only"):
            self.view(CudaArray(data=(4096, True)), writable=True)
        with self.assertRaisesRegex(TypeError, "cannot view a CudaArray"):
            _tensor.view(CudaArray(), "q", _abi.DEVICE_CPU, [])

    @unittest.skipUnless(os.environ.get("FLASHATTN_FAKE_DRIVER"), "FLASHATTN_FAKE_DRIVER is not set")
    def test_the_call_waits_for_the_producer(self):
        code = (
            "from tests.test_protocols import CudaArray\n"
            "from flashattn import _abi, _tensor\n"
            "_tensor.view(CudaArray(stream=77), 'q', _abi.DEVICE_CUDA, [], stream=88)\n"
            "_tensor.view(CudaArray(stream=77), 'k', _abi.DEVICE_CUDA, [])\n"
            "try:\n"
            "    _tensor.view(CudaArray(stream=13), 'v', _abi.DEVICE_CUDA, [])\n"
            "except RuntimeError as error:\n"
            "    print(error)\n"
        )
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": os.environ["FLASHATTN_FAKE_DRIVER"],
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        result = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True, check=True, env=environment)
        self.assertEqual(
            result.stdout.splitlines(),
            [
                "create 2",
                "record 5 on 77",
                "wait of 88 for 5, flags 0",
                "destroy 5",
                "create 2",
                "record 5 on 77",
                "wait of 1 for 5, flags 0",
                "destroy 5",
                "create 2",
                "record 5 on 13",
                "destroy 5",
                "cuEventRecord failed with CUDA driver error 400",
            ],
        )

    def test_streams(self):
        class Protocol:
            def __cuda_stream__(self):
                return (0, 11)

        class Property:
            __cuda_stream__ = (0, 12)

        class Newer:
            __cuda_stream__ = (1, 12)

        class Torch:
            cuda_stream = 13

        class CuPy:
            ptr = 14

        handles = [_tensor.stream_handle(s) for s in (None, 7, Protocol(), Property(), Torch(), CuPy())]
        self.assertEqual(handles, [None, 7, 11, 12, 13, 14])
        for wrong, words in ((Newer(), "version 1"), ("7", "stream is a str")):
            with self.assertRaisesRegex(TypeError, words):
                _tensor.stream_handle(wrong)
        q = buffer(1, 3, 1, 2)
        flashattn.forward(q, q, q, stream=Protocol())  # the CPU ignores it

    def test_results_need_an_allocator(self):
        with self.assertRaisesRegex(TypeError, "out must be given: a CudaArray brings no allocator"):
            _tensor.allocate((1,), _abi.FLOAT32, "out", _abi.DEVICE_CUDA, CudaArray(), zeroed=False)


class SeedTest(unittest.TestCase):
    def test_seed_from_memory(self):
        q = buffer(1, 32, 1, 8)
        v = memoryview(array.array("f", range(256))).cast("B").cast("f", (1, 32, 1, 8))
        results = []
        for seed in (5, memoryview(array.array("q", [5])), 6):
            out, _ = flashattn.forward(q, q, v, dropout_p=0.5, dropout_seed=seed)
            results.append([out[0, i, 0, 3] for i in range(32)])
        self.assertEqual(results[0], results[1])
        self.assertNotEqual(results[0], results[2])
        for wrong in (memoryview(array.array("i", [5])), memoryview(array.array("q", [5, 6]))):
            with self.assertRaisesRegex(TypeError, "dropout_seed must be a number or one int64"):
                flashattn.forward(q, q, q, dropout_p=0.5, dropout_seed=wrong)


if __name__ == "__main__":
    unittest.main()
