# SPDX-License-Identifier: Apache-2.0
"""The custom operator com.flashattn.Attention in models that ONNX Runtime runs, next to float64. FLASHATTN_ONNX names the library of the operator."""

import concurrent.futures
import os
import unittest

try:
    import numpy as np
    import onnx
    import onnxruntime
except ImportError as error:
    raise unittest.SkipTest(f"{error.name} is not installed") from error
from onnx import TensorProto, helper

from tests import reference

LIBRARY = os.environ.get("FLASHATTN_ONNX")
BATCH, HEADS, KEY_HEADS = 2, 4, 2


def session(threads=0, dtype=TensorProto.FLOAT, ranks=(4, 4, 4), **attributes):
    """Of a model with the operator alone, whose inputs and outputs are float32, cast to `dtype` and back."""
    nodes = [helper.make_node("Cast", [name], [name + "_cast"], to=dtype) for name in "QKV"]
    nodes.append(helper.make_node("Attention", ["Q_cast", "K_cast", "V_cast"], ["Y_cast"], domain="com.flashattn", **attributes))
    nodes.append(helper.make_node("Cast", ["Y_cast"], ["Y"], to=TensorProto.FLOAT))
    if dtype == TensorProto.FLOAT:
        nodes = [helper.make_node("Attention", ["Q", "K", "V"], ["Y"], domain="com.flashattn", **attributes)]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in zip("QKV", ranks)]
    graph = helper.make_graph(nodes, "attention", inputs, [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None] * 4)])
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("com.flashattn", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(LIBRARY)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def draw(rows, keys, dim=16, dim_v=16):
    shapes = ((BATCH, HEADS, rows, dim), (BATCH, KEY_HEADS, keys, dim), (BATCH, KEY_HEADS, keys, dim_v))
    return {name: np.random.standard_normal(shape).astype(np.float32) for name, shape in zip("QKV", shapes)}


def expected(given, **options):
    q, k, v = (given[name].swapaxes(1, 2) for name in "QKV")
    return reference.forward(q, k, v, **options)[0].swapaxes(1, 2)


@unittest.skipUnless(LIBRARY, "FLASHATTN_ONNX is not set")
class AttentionTest(unittest.TestCase):
    def check(self, rows, keys, attributes, options, dtype=TensorProto.FLOAT, tolerance=1e-4, **dims):
        given = draw(rows, keys, **dims)
        run = session(dtype=dtype, **attributes)
        right = expected(given, **options)
        binding = run.io_binding()
        for name, x in given.items():
            binding.bind_cpu_input(name, x)
        poisoned = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(right.shape, np.nan, np.float32))
        binding.bind_ortvalue_output("Y", poisoned)
        run.run_with_iobinding(binding)
        np.testing.assert_allclose(poisoned.numpy(), right, rtol=tolerance, atol=tolerance)

    def test_masks_and_scores(self):
        for attributes, options in (
            ({}, {}),
            (dict(is_causal=0), {}),
            (dict(is_causal=1), dict(causal="top_left")),
            (dict(is_causal=2), dict(causal=True)),
            (dict(scale=0.7), dict(scale=np.float32(0.7))),
            (dict(softcap=1.5), dict(softcap=1.5)),
            (dict(is_causal=2, window_left=4), dict(causal=True, window=(4, None))),
            (dict(window_left=3, window_right=0), dict(window=(3, 0))),
        ):
            for rows, keys in ((19, 19), (5, 23), (1, 40)):
                with self.subTest(rows=rows, keys=keys, **attributes):
                    self.check(rows, keys, attributes, options)

    def test_types(self):
        for dtype, tolerance in ((TensorProto.FLOAT16, 8e-3), (TensorProto.BFLOAT16, 6e-2)):
            with self.subTest(dtype=dtype):
                self.check(33, 33, dict(is_causal=1), dict(causal="top_left"), dtype, tolerance)

    def test_values_of_another_width(self):
        self.check(9, 17, {}, {}, dim=24, dim_v=8)

    def test_many_threads_at_once(self):
        run = session()
        cases = [draw(30 + n, 50) for n in range(16)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda given: run.run(None, given)[0], cases))
        for given, result in zip(cases, results):
            np.testing.assert_allclose(result, expected(given), rtol=1e-4, atol=1e-4)

    def test_threads_are_those_of_the_session(self):
        given = draw(300, 500)
        for threads in (1, 3):
            with self.subTest(threads=threads):
                run = session(threads)
                before = os.listdir("/proc/self/task")
                result = run.run(None, given)[0]
                np.testing.assert_allclose(result, expected(given), rtol=1e-4, atol=1e-4)
                if tuple(int(n) for n in onnxruntime.__version__.split(".")[:2]) >= (1, 17):
                    self.assertEqual(set(os.listdir("/proc/self/task")) - set(before), set())

    def test_attributes_are_refused_with_a_sentence(self):
        for attributes, words in (
            (dict(is_causal=3), "is_causal is 3; it must be 0, 1 or 2"),
            (dict(q_num_heads=4), "q_num_heads is given"),
            (dict(scale=0.0), "scale is 0.0*; it must be positive"),
            (dict(scale=1), "scale must be a float"),
            (dict(window_left=1.0), "window_left must be an integer"),
        ):
            with self.subTest(**attributes), self.assertRaisesRegex(Exception, words):
                session(**attributes)

    def test_inputs_are_refused_with_a_sentence(self):
        given = draw(4, 4)
        given["K"] = given["K"][..., :8].copy()
        with self.assertRaisesRegex(Exception, r"Attention: .*k.shape\[3\] is 8"):
            session().run(None, given)
        given["K"] = given["K"][0]
        with self.assertRaisesRegex(Exception, "K has 3 dimensions"):
            session(ranks=(4, 3, 4)).run(None, given)


if __name__ == "__main__":
    unittest.main()
