#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the lines of README's table "Switching" gain on the CPU: each program by itself, and with its line.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so FLASHATTN_ONNX=build/release/bindings/onnxruntime/libflashattn_onnx.so \\
        tests/bench/fa_bench_switch.py --threads 8

transformers  a Llama of 4 layers, 16 heads and 4 KV heads of 64 columns, random parameters: prefill of --rows tokens; a training step
              without an optimiser; 32 new tokens behind a prompt of --rows tokens. Against attn_implementation="sdpa".
diffusers     a transformer of images (DiT) of 4 layers, 16 heads of 72 columns, 1024 patches: a forward pass. Against PyTorch's attention.
onnxruntime   one node of attention, causal, 8 heads of 128 columns, --rows rows. Against ONNX Runtime's own `Attention` of opset 23.
numpy         attention by its formula in NumPy, the same sizes.

Both contenders of a row run in one process, interleaved in random order; times are medians. With --cpu-time, for one thread on a machine that
others use, processor time counts. A package that is not installed is left out, with the reason.
"""

import argparse
import os
import random
import statistics
import time


def measure(contenders, seconds, clock):
    """Seconds of a call by that clock, by name."""
    times = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name in random.sample(list(contenders), len(contenders)):
            begin = clock()
            contenders[name]()
            times[name].append(clock() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def installed_while(call):
    """The call with flashattn.torch.install(), which costs microseconds."""
    from flashattn.torch import install, uninstall

    def run():
        install()
        try:
            return call()
        finally:
            uninstall()

    return run


def transformers_rows(rows, dtype_name):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import flashattn.transformers

    def model(implementation):
        config = LlamaConfig(
            vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
            max_position_embeddings=2 * rows,
        )  # fmt: skip
        return LlamaForCausalLM._from_config(config, attn_implementation=implementation, dtype=getattr(torch, dtype_name))

    torch.manual_seed(1)
    sdpa, ours = model("sdpa"), model(flashattn.transformers.register())
    ours.load_state_dict(sdpa.state_dict())
    tokens = torch.randint(sdpa.config.vocab_size, (1, rows))

    def prefill(model):
        with torch.no_grad():
            model(tokens, logits_to_keep=1)

    def train(model):
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens).loss.backward()

    def generate(model):
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)

    for name, step in (("prefill", prefill), ("training step", train), ("prompt and 32 tokens", generate)):
        yield f"transformers, {dtype_name}, {name}", {"libflashattn": lambda s=step: s(ours), "before": lambda s=step: s(sdpa)}


def diffusers_rows(rows, dtype_name):
    import torch
    from diffusers import DiTTransformer2DModel

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(1)
    model = DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=72, num_layers=4, sample_size=64, patch_size=2).to(dtype)
    image = torch.randn(1, 4, 64, 64, dtype=dtype)

    def forward():
        with torch.no_grad():
            model(image, timestep=torch.tensor([3]), class_labels=torch.tensor([1]))

    yield f"diffusers, {dtype_name}, forward", {"libflashattn": installed_while(forward), "before": forward}


def onnxruntime_rows(rows, dtype_name):
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    if "FLASHATTN_ONNX" not in os.environ:
        raise ImportError("FLASHATTN_ONNX is not set")
    if dtype_name != "float32":
        return
    given = {name: np.random.standard_normal((1, 8, rows, 128)).astype(np.float32) for name in "QKV"}

    def session(domain):
        node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], domain=domain, is_causal=1)
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "QKV"]
        graph = helper.make_graph([node], "attention", inputs, [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None] * 4)])
        opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        options.register_custom_ops_library(os.environ["FLASHATTN_ONNX"])
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return lambda: made.run(None, given)

    yield "onnxruntime, float32, causal", {"libflashattn": session("com.flashattn"), "before": session("")}


def numpy_rows(rows, dtype_name):
    import numpy as np

    import flashattn

    if dtype_name != "float32":
        return
    q, k, v = (np.random.standard_normal((1, rows, 8, 128)).astype(np.float32) for _ in range(3))
    hidden = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)

    def formula():
        s = np.einsum("bihd,bjhd->bhij", q, k, optimize=True) / np.float32(np.sqrt(128)) + hidden
        p = np.exp(s - s.max(-1, keepdims=True))
        return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v, optimize=True)

    yield "numpy, float32, causal", {"libflashattn": lambda: flashattn.forward(q, k, v, causal=True), "before": formula}


ROWS = {"transformers": transformers_rows, "diffusers": diffusers_rows, "onnxruntime": onnxruntime_rows, "numpy": numpy_rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row (5)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of elapsed time; with --threads 1")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time is for --threads 1")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # the library takes as many threads as there are processors
    # Before the libraries of matrices are loaded, which read them once.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(arguments.threads)
    print(f"{arguments.threads} threads, {arguments.rows} rows\n| | before, ms | libflashattn, ms | ratio |\n|---|---|---|---|")
    for name in arguments.only:
        for dtype_name in arguments.dtypes:
            try:
                for title, contenders in ROWS[name](arguments.rows, dtype_name):
                    times = measure(contenders, arguments.seconds, time.process_time if arguments.cpu_time else time.perf_counter)
                    before, ours = (1e3 * times[each] for each in ("before", "libflashattn"))
                    print(f"| {title} | {before:.1f} | {ours:.1f} | {before / ours:.2f} |", flush=True)
            except ImportError as error:
                print(f"left out: {name}: {error}", flush=True)
                break


if __name__ == "__main__":
    main()
