#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU beside PyTorch's, in one process: forward and backward of 16 heads, GFLOP/s of each and their ratio.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_bench_cpu_peers.py --threads 8,16

The contenders run in random order, again and again. Each run sleeps first, so that idle threads of the other one have stopped spinning,
and begins with a call that is not timed. The fastest call counts. FLOPs are 4 N N D per head (backward 2.5 times that), causal half of them.
"""
import argparse
import random
import time

import torch
from flashattn.torch import scaled_dot_product_attention

HEADS = 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SDPA = {"ours": scaled_dot_product_attention, "PyTorch": torch.nn.functional.scaled_dot_product_attention}


def contenders(dtype, head_dim, seqlen, causal, backward):
    """By name: functions of no arguments."""
    # (B, H, N, D) as views of (B, N, H, D), which is how a projection leaves them.
    q, k, v, dout = (torch.randn(1, seqlen, HEADS, head_dim).to(dtype).transpose(1, 2) for _ in range(4))
    result = {}
    for name, sdpa in SDPA.items():
        if backward:
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            out = sdpa(*leaves, is_causal=causal)
            result[name] = lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        else:
            result[name] = lambda sdpa=sdpa: sdpa(q, k, v, is_causal=causal)
    return result


def measure(functions, seconds):
    """The least seconds of a call, by name."""
    best = {}
    order = list(functions)
    end = time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        random.shuffle(order)
        for name in order:
            time.sleep(0.01)
            functions[name]()
            for _ in range(3):
                start = time.perf_counter()
                functions[name]()
                took = time.perf_counter() - start
                best[name] = min(best.get(name, took), took)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="8")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32, or several with commas")
    parser.add_argument("--seqlen", default="512,2048")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    arguments = parser.parse_args()
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; GFLOP/s")
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        for dtype in arguments.dtype.split(","):
            for backward in (False, True):
                for head_dim in (64, 128):
                    for seqlen in map(int, arguments.seqlen.split(",")):
                        for causal in (False, True):
                            best = measure(contenders(DTYPES[dtype], head_dim, seqlen, causal, backward), arguments.seconds)
                            flop = 4 * seqlen * seqlen * head_dim * HEADS * (0.5 if causal else 1) * (2.5 if backward else 1)
                            rates = {name: flop / took * 1e-9 for name, took in best.items()}
                            row = (f"{'backward' if backward else 'forward'} {dtype} D{head_dim} {'causal' if causal else 'full'} "
                                   f"N{seqlen} T{threads}")
                            print(f"{row:36s} ours {rates['ours']:7.1f}  PyTorch {rates['PyTorch']:7.1f}  "
                                  f"ratio {rates['ours'] / rates['PyTorch']:5.2f}", flush=True)


if __name__ == "__main__":
    main()
