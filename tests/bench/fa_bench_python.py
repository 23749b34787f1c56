#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call of flashattn.torch costs the host, beside PyTorch's own attention: microseconds of a problem so small that nothing else counts.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_bench_python.py

The contenders run in one process, interleaved in random order. On the CPU, with one thread, the time is that of the process, so that
other programs do not count; on CUDA it is the wall clock until the calls have been enqueued.
"""
import argparse
import random
import statistics
import time

import torch
from flashattn.torch import attention, scaled_dot_product_attention

CALLS = 50  # between two readings of the clock


def contenders(device):
    """By name: functions of no arguments."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rows = 1 if device == "cpu" else 64
    plain = [torch.randn(1, 1, rows, 64, device=device, dtype=dtype) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in plain]
    rows_first = [x.transpose(1, 2) for x in plain]
    dout = torch.ones_like(plain[0])
    result = {"attention": lambda: attention(*rows_first)}
    for name, sdpa in (("drop-in", scaled_dot_product_attention), ("PyTorch", torch.nn.functional.scaled_dot_product_attention)):
        out = sdpa(*leaves)
        result[f"{name}, forward"] = lambda sdpa=sdpa: sdpa(*plain)
        result[f"{name}, forward that saves for backward"] = lambda sdpa=sdpa: sdpa(*leaves)
        result[f"{name}, backward"] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return result


def measure(functions, device, rounds):
    """Microseconds of each call, a list for each function."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            if device != "cpu":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(CALLS):
                functions[name]()
            times[name].append((clock() - start) / CALLS * 1e6)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'PyTorch ' + torch.__version__ + ', ' + arguments.device:44s} {'min':>7s} {'median':>7s}  us")
    for name, times in measure(contenders(arguments.device), arguments.device, arguments.rounds).items():
        print(f"{name:44s} {min(times):7.1f} {statistics.median(times):7.1f}")


if __name__ == "__main__":
    main()
