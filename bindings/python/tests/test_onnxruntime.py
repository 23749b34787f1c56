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


#: Of the operator, in their order; all but Q, K, V and Y may be absent.
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value")


def model_of(inputs, outputs, domain, opset, dtype, attributes):
    """With one node. inputs: by name, the type and the number of dimensions. In fp16 and bf16 what goes in and out is float32, cast to `dtype` and back."""
    casts = dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    given, nodes = [], []
    for name in INPUTS[: max(INPUTS.index(name) for name in inputs) + 1]:
        if name not in inputs:
            given.append("")
        elif casts and inputs[name][0] == TensorProto.FLOAT:
            nodes.append(helper.make_node("Cast", [name], [name + "_cast"], to=dtype))
            given.append(name + "_cast")
        else:
            given.append(name)
    results = [name + "_cast" if casts else name for name in outputs]
    nodes.append(helper.make_node("Attention", given, results, domain=domain, **attributes))
    if casts:
        nodes.extend(helper.make_node("Cast", [name + "_cast"], [name], to=TensorProto.FLOAT) for name in outputs)
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, each, [None] * dims) for name, (each, dims) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT if casts else dtype, None) for name in outputs],
        # ONNX Runtime 1.16 and 1.17 do not infer the types of results of a custom operator that lacks inputs before its last.
        value_info=[helper.make_tensor_value_info(name, dtype, None) for name in results if casts],
    )
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def session_of(inputs, outputs=("Y",), threads=0, dtype=TensorProto.FLOAT, **attributes):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(LIBRARY)
    model = model_of(inputs, outputs, "com.flashattn", 19, dtype, attributes)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def session(threads=0, dtype=TensorProto.FLOAT, ranks=(4, 4, 4), **attributes):
    return session_of(
        {name: (TensorProto.FLOAT, dims) for name, dims in zip("QKV", ranks)}, ("Y",), threads, dtype, **attributes
    )


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
            (dict(is_causal=2, left_window_size=4), dict(causal=True, window=(4, None))),
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
            (dict(softmax_precision=10), "softmax_precision is 10; softmax is computed in float32"),
            (dict(right_window_size=-2), "right_window_size is -2; it must be -1 or more"),
            (dict(scale=0.0), "scale is 0.0*; it must be positive"),
            (dict(scale=1), "scale must be a float"),
            (dict(left_window_size=1.0), "left_window_size must be an integer"),
        ):
            with self.subTest(**attributes), self.assertRaisesRegex(Exception, words):
                session(**attributes)

    def test_inputs_are_refused_with_a_sentence(self):
        given = draw(4, 4)
        given["K"] = given["K"][..., :8].copy()
        with self.assertRaisesRegex(Exception, r"Attention: .*k.shape\[3\] is 8"):
            session().run(None, given)
        given["K"] = given["K"][0]
        with self.assertRaisesRegex(Exception, r"K has shape \(2, 4, 8\), which needs the attribute kv_num_heads"):
            session(ranks=(4, 3, 4)).run(None, given)
        with self.assertRaisesRegex(
            Exception, r"K has shape \(2, 4, 8\), whose last dimension is no multiple of kv_num_heads, 3"
        ):
            session(ranks=(4, 3, 4), kv_num_heads=3).run(None, given)

    def test_optional_inputs_are_refused_with_a_sentence(self):
        given = draw(4, 6)
        past = np.zeros((BATCH, KEY_HEADS, 5, 16), np.float32)
        lengths = np.array([3, 7])
        for more, words in (
            (dict(attn_mask=np.zeros((4, 6), np.int32)), "attn_mask must be of bool, or of the type of Q"),
            (dict(attn_mask=np.zeros(6, bool)), r"attn_mask has shape \(6\); it needs two to four dimensions"),
            (dict(attn_mask=np.zeros((3, 6), bool)), r"element_mask.shape\[2\] is 3"),
            (
                dict(attn_mask=np.zeros((4, 1), bool)),
                r"attn_mask has shape \(4, 1\), with one of 6 keys; .* give it all of them",
            ),
            (dict(past_key=past), "of past_key and past_value one is given"),
            (dict(past_key=past, past_value=past[:, :, :4]), r"past_value has shape \(2, 2, 4, 16\); it needs \(2, 2, 5, 16\)"),
            (dict(past_key=past[:, :1], past_value=past), r"past_key has shape \(2, 1, 5, 16\); it needs \(2, 2, rows, 16\)"),
            (dict(nonpad_kv_seqlen=lengths), r"nonpad_kv_seqlen\[1\] is 7; K has 6 rows"),
            (dict(nonpad_kv_seqlen=lengths[:1]), r"nonpad_kv_seqlen has shape \(1\); it needs \(2\)"),
            (dict(past_key=past, past_value=past, nonpad_kv_seqlen=lengths), "nonpad_kv_seqlen is given beside past_key"),
        ):
            with self.subTest(words), self.assertRaisesRegex(Exception, words):
                self.run_node({**given, **more}, ("Y",), {})

    def run_node(self, given, outputs, attributes, dtype=TensorProto.FLOAT):
        inputs = {name: (helper.np_dtype_to_tensor_dtype(x.dtype), x.ndim) for name, x in given.items()}
        return session_of(inputs, outputs, dtype=dtype, **attributes).run(list(outputs), given)

    @unittest.skipUnless(
        tuple(int(n) for n in onnx.__version__.split(".")[:2]) >= (1, 23),
        f"the reference of onnx 1.23 is not installed, but {onnx.__version__}",
    )
    def test_beside_the_reference_of_onnx(self):
        from onnx.reference import ReferenceEvaluator

        def masks(rows, keys):
            full = np.random.random((BATCH, HEADS, rows, keys)) < 0.6
            full[:, :, 0] = False  # a row that sees no key
            numbers = np.where(full, np.random.standard_normal(full.shape), -np.inf).astype(np.float32)
            yield from (full, full[:, :1], full[0], full[0, 0], full[:1, :, :1], full[..., : keys - 2])
            yield from (numbers, numbers[0, 0], numbers[:1, :, 1:2], numbers[..., : keys - 2])

        cases = []
        windows = (dict(left_window_size=2), dict(right_window_size=1), dict(left_window_size=4, right_window_size=2))
        for rows, keys in ((7, 7), (4, 9), (9, 8)):
            for attributes in ({}, dict(is_causal=1), *windows, dict(is_causal=1, left_window_size=3)):
                cases.append((rows, keys, 0, attributes, {}))
                cases.append((rows, keys, 5, attributes, {}))
            for mask in masks(rows, keys):
                cases.append((rows, keys, 0, dict(softcap=1.5), dict(attn_mask=mask)))
                cases.append((rows, keys, 0, dict(is_causal=1), dict(attn_mask=mask)))
        for mask in masks(3, 8):
            cases.append((3, 3, 5, dict(is_causal=1), dict(attn_mask=mask)))
        for lengths in ([9, 4], [5, 0]):
            for attributes in ({}, dict(is_causal=1), dict(left_window_size=2, right_window_size=1)):
                cases.append((4, 9, 0, attributes, dict(nonpad_kv_seqlen=np.array(lengths))))
        for rows, keys, past, attributes, more in cases:
            for dims in (4, 3):
                given = draw(rows, keys, dim=16, dim_v=8)
                outputs = ("Y",)
                if past:
                    given["past_key"] = np.random.standard_normal((BATCH, KEY_HEADS, past, 16)).astype(np.float32)
                    given["past_value"] = np.random.standard_normal((BATCH, KEY_HEADS, past, 8)).astype(np.float32)
                    outputs = OUTPUTS
                heads = {}
                if dims == 3:
                    heads = dict(q_num_heads=HEADS, kv_num_heads=KEY_HEADS)
                    given.update(
                        {
                            name: given[name].swapaxes(1, 2).reshape(BATCH, -1, given[name].shape[1] * given[name].shape[3])
                            for name in "QKV"
                        }
                    )
                given.update(more)
                shapes = {name: x.shape for name, x in given.items()}
                with self.subTest(**shapes, **attributes):
                    double = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in given.items()}
                    if (
                        "attn_mask" in double
                    ):  # the reference takes a mask of one row for a single row also where it adds the causal one
                        mask = double["attn_mask"]
                        double["attn_mask"] = np.broadcast_to(mask, (*mask.shape[:-2], rows, mask.shape[-1])).copy()
                    inputs = {name: (helper.np_dtype_to_tensor_dtype(x.dtype), x.ndim) for name, x in double.items()}
                    right = ReferenceEvaluator(
                        model_of(inputs, outputs, "", 25, TensorProto.DOUBLE, {**attributes, **heads})
                    ).run(list(outputs), double)
                    for name, got, want in zip(outputs, self.run_node(given, outputs, {**attributes, **heads}), right):
                        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=name)

    def test_present_keys_without_past_ones(self):
        given = draw(5, 9, dim_v=24)
        _, key, value = self.run_node(given, OUTPUTS, {})
        np.testing.assert_array_equal(key, given["K"])
        np.testing.assert_array_equal(value, given["V"])

    def test_past_keys_without_present_ones(self):
        given = draw(3, 3)
        past = {
            name: np.random.standard_normal((BATCH, KEY_HEADS, 6, 16)).astype(np.float32) for name in ("past_key", "past_value")
        }
        for dtype, tolerance in ((TensorProto.FLOAT, 1e-4), (TensorProto.FLOAT16, 8e-3)):
            (got,) = self.run_node({**given, **past}, ("Y",), dict(is_causal=1), dtype)
            whole = {
                "Q": given["Q"],
                **{name: np.concatenate((past[old], given[name]), 2) for name, old in (("K", "past_key"), ("V", "past_value"))},
            }
            np.testing.assert_allclose(got, expected(whole, causal=True), rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    unittest.main()
