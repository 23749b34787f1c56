#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU beside PyTorch's, in one process: forward and backward of 16 heads, GFLOP/s of each and their ratio.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_bench_cpu_peers.py --threads 8,16

The contenders run in random order, again and again. Each run sleeps first, so that idle threads of the other one have stopped spinning,
and begins with a call that is not timed. The fastest call counts. FLOPs are 4 N N D per head (backward 2.5 times that), causal half of them.
With --cpu-time, for one thread on a machine that others use, the median of processor time counts.

Cases besides plain attention: a bias of numbers (N, N) for all heads, a mask of bool (N, N) that hides a tenth of the pairs at random,
4 key heads, dropout of 0.1, and one head instead of 16.
"""
import argparse
import functools
import random
import statistics
import time

import torch
from flashattn.torch import scaled_dot_product_attention

HEADS = 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SDPA = {"ours": scaled_dot_product_attention, "PyTorch": torch.nn.functional.scaled_dot_product_attention}
CASES = ("plain", "bias", "mask", "gqa", "dropout", "head")


def options(case, dtype, seqlen):
    """Query heads, key heads and keyword arguments of a case."""
    if case == "bias":
        return HEADS, HEADS, {"attn_mask": torch.randn(seqlen, seqlen).to(dtype)}
    if case == "mask":
        return HEADS, HEADS, {"attn_mask": torch.rand(seqlen, seqlen) > 0.1}
    if case == "gqa":
        return HEADS, HEADS // 4, {"enable_gqa": True}
    if case == "dropout":
        return HEADS, HEADS, {"dropout_p": 0.1}
    return (1, 1, {}) if case == "head" else (HEADS, HEADS, {})


def contenders(case, dtype, head_dim, seqlen, causal, backward):
    """By name: functions of no arguments. Also the number of query heads."""
    heads, heads_k, keywords = options(case, dtype, seqlen)
    # (B, H, N, D) as views of (B, N, H, D), which is how a projection leaves them.
    q, k, v, dout = (torch.randn(1, seqlen, n, head_dim).to(dtype).transpose(1, 2) for n in (heads, heads_k, heads_k, heads))
    result = {}
    for name, sdpa in SDPA.items():
        if backward:
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            out = sdpa(*leaves, is_causal=causal, **keywords)
            result[name] = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        else:
            result[name] = functools.partial(sdpa, q, k, v, is_causal=causal, **keywords)
    return result, heads


def measure(functions, seconds, cpu_time):
    """Seconds of a call, by name."""
    clock = time.process_time if cpu_time else time.perf_counter
    times = {name: [] for name in functions}
    order = list(functions)
    end = time.perf_counter() + seconds
    while not times[order[0]] or time.perf_counter() < end:
        random.shuffle(order)
        for name in order:
            time.sleep(0.01)
            functions[name]()
            for _ in range(3):
                start = clock()
                functions[name]()
                times[name].append(clock() - start)
    return {name: statistics.median(x) if cpu_time else min(x) for name, x in times.items()}


def numbers(text):
    return [int(x) for x in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=numbers, default=[8])
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32, or several with commas")
    parser.add_argument("--case", default="plain", help=f"{', '.join(CASES)}, or several with commas")
    parser.add_argument("--head-dim", type=numbers, default=[64, 128])
    parser.add_argument("--seqlen", type=numbers, default=[512, 2048])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    parser.add_argument("--cpu-time", action="store_true", help="processor time; rows of one thread only")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != [1]:
        parser.error(f"--cpu-time is for --threads 1, not {arguments.threads}")
    for case in arguments.case.split(","):
        if case not in CASES:
            parser.error(f"--case is {case}; it must be one of {', '.join(CASES)}")
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; GFLOP/s")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for case in arguments.case.split(","):
            for dtype in arguments.dtype.split(","):
                for backward in (False, True):
                    for head_dim in arguments.head_dim:
                        for seqlen in arguments.seqlen:
                            # PyTorch refuses a mask beside is_causal.
                            for causal in (False, True) if case not in ("bias", "mask") else (False,):
                                functions, heads = contenders(case, DTYPES[dtype], head_dim, seqlen, causal, backward)
                                took = measure(functions, arguments.seconds, arguments.cpu_time)
                                flop = 4 * seqlen * seqlen * head_dim * heads * (0.5 if causal else 1) * (2.5 if backward else 1)
                                rates = {name: flop / x * 1e-9 for name, x in took.items()}
                                row = (f"{'backward' if backward else 'forward'} {case} {dtype} D{head_dim} "
                                       f"{'causal' if causal else 'full'} N{seqlen} T{threads}")
                                print(f"{row:44s} ours {rates['ours']:7.1f}  PyTorch {rates['PyTorch']:7.1f}  "
                                      f"ratio {rates['ours'] / rates['PyTorch']:5.2f}", flush=True)


if __name__ == "__main__":
    main()
