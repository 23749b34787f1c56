# SPDX-License-Identifier: Apache-2.0
"""What is refused, how it is said, and everything that needs no NumPy."""

import array
import math
import os
import pickle
import subprocess
import sys
import unittest

import flashattn


def tensor(*shape, value=0.5):
    """A float32 memoryview."""
    return memoryview(array.array("f", [value] * math.prod(shape))).cast("B").cast("f", shape)


class WithoutNumpyTest(unittest.TestCase):
    def test_buffers_in_and_out(self):
        values = tensor(1, 3, 1, 2, value=0)
        values[0, 0, 0, 0], values[0, 2, 0, 1] = 3.0, 6.0
        out, lse = tensor(1, 3, 1, 2, value=math.nan), tensor(1, 1, 3, value=math.nan)
        flashattn.forward(tensor(1, 3, 1, 2), tensor(1, 3, 1, 2), values, out=out, lse=lse)
        for row in range(3):
            self.assertAlmostEqual(out[0, row, 0, 0], 1.0, places=6)
            self.assertAlmostEqual(out[0, row, 0, 1], 2.0, places=6)
            self.assertAlmostEqual(lse[0, 0, row], math.log(3) + 0.5 / math.sqrt(2), places=6)

    def test_results_without_numpy(self):
        code = (
            "import sys; sys.modules['numpy'] = None\n"
            "import array, flashattn\n"
            "q = memoryview(array.array('f', [1.0] * 12)).cast('B').cast('f', (1, 3, 2, 2))\n"
            "out, lse = flashattn.forward(q, q, q)\n"
            "gradients = flashattn.backward(q, q, q, q, out, lse)\n"
            "assert out.shape == (1, 3, 2, 2) and lse.shape == (1, 2, 3), (out.shape, lse.shape)\n"
            "assert abs(out[0, 2, 1, 1] - 1.0) < 1e-6 and abs(gradients.dv[0, 0, 0, 0] - 1.0) < 1e-6\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def test_read_only_output(self):
        with self.assertRaisesRegex(TypeError, "out is read-only"):
            flashattn.forward(*[tensor(1, 3, 1, 2)] * 3, out=tensor(1, 3, 1, 2).toreadonly())

    def test_not_a_tensor(self):
        with self.assertRaisesRegex(TypeError, "k: cannot view a object as a tensor"):
            flashattn.forward(tensor(1, 3, 1, 2), object(), tensor(1, 3, 1, 2))
        with self.assertRaisesRegex(TypeError, "q must be given"):
            flashattn.forward(None, None, None)
        doubles = memoryview(array.array("d", [0.0] * 6)).cast("B").cast("d", (1, 3, 1, 2))
        with self.assertRaisesRegex(TypeError, "format 'd'"):
            flashattn.forward(doubles, doubles, doubles)


class ErrorTest(unittest.TestCase):
    def refused(self, name, words, *arguments, **options):
        with self.assertRaises(flashattn.Error) as caught:
            flashattn.forward(*arguments, **options)
        self.assertEqual(caught.exception.name, name)
        self.assertIn(words, caught.exception.text)
        self.assertIn(name, str(caught.exception))
        return caught.exception

    def test_the_library_names_the_argument(self):
        q = tensor(1, 3, 1, 2)
        self.refused("FA_ERROR_SHAPE", "k", q, tensor(1, 3, 1, 4), q)
        self.refused("FA_ERROR_INVALID_ARGUMENT", "dropout_p", q, q, q, dropout_p=1.5)
        self.refused("FA_ERROR_INVALID_ARGUMENT", "window_left", q, q, q, window=(-1, None))
        q3 = tensor(1, 3, 3, 2)
        error = self.refused("FA_ERROR_SHAPE", "heads", q3, tensor(1, 3, 2, 2), tensor(1, 3, 2, 2))
        self.assertEqual(error.status, 102)
        self.assertEqual(str(pickle.loads(pickle.dumps(error))), str(error))

    def test_query_refuses_what_the_call_would(self):
        q = tensor(1, 3, 1, 2)
        self.assertGreater(flashattn.query_forward(q, q, q).flops, 0)
        with self.assertRaises(flashattn.Error):
            flashattn.query_forward(q, q, q, softcap=-1.0)

    def test_options(self):
        q = tensor(1, 3, 1, 2)
        with self.assertRaisesRegex(TypeError, "no_such_option"):
            flashattn.forward(q, q, q, no_such_option=1)
        with self.assertRaisesRegex(ValueError, "causal is 'middle'"):
            flashattn.forward(q, q, q, causal="middle")
        with self.assertRaisesRegex(ValueError, "scale is 0"):
            flashattn.forward(q, q, q, scale=0.0)
        with self.assertRaisesRegex(OverflowError, "dropout_seed"):
            flashattn.forward(q, q, q, dropout_seed=2**64)

    def test_contexts(self):
        lines = []
        with flashattn.Context(
            "cpu", threads=1, cpu_isa="portable", log=lambda level, text: lines.append((level, text))
        ) as context:
            self.assertEqual((context.info.device, context.info.num_threads, context.info.cpu_isa), ("cpu", 1, "portable"))
            with self.assertRaises(flashattn.Error) as caught:
                context.forward(tensor(1, 3, 1, 2), tensor(1, 3, 1, 4), tensor(1, 3, 1, 2))
        self.assertIn((1, caught.exception.text), lines)
        with self.assertRaisesRegex(ValueError, "closed"):
            context.info
        with self.assertRaises(flashattn.Error) as caught:
            flashattn.Context("cpu", index=7)
        self.assertEqual(caught.exception.name, "FA_ERROR_NO_DEVICE")
        with self.assertRaises(OverflowError):
            flashattn.Context("cpu", threads=2**32)
        with self.assertRaises(ValueError):
            flashattn.Context("tpu")

    def test_version(self):
        self.assertRegex(flashattn.version(), r"^\d+\.\d+\.\d+$")
        self.assertIn("version=" + flashattn.version(), flashattn.build_info())

    def test_a_missing_library_is_an_import_error(self):
        result = subprocess.run(
            [sys.executable, "-c", "import flashattn"],
            env={**os.environ, "FLASHATTN_LIBRARY": "/nonexistent/libflashattn.so", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("ImportError: libflashattn cannot be loaded (set FLASHATTN_LIBRARY", result.stderr)


if __name__ == "__main__":
    unittest.main()
