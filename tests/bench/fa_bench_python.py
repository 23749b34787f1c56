#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call of flashattn.torch costs the host, beside PyTorch's own attention: microseconds of a problem so small that nothing else counts.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_bench_python.py

The contenders run in one process, interleaved in random order. On the CPU, with one thread, the time is that of the process, so that
other programs do not count; on CUDA it is the wall clock until the calls have been enqueued. "installed" is PyTorch's function after
flashattn.torch.install(), which needs the extension (python3 -m flashattn.build_torch); "fa_forward" is the C function, called by ctypes
with arguments that are ready.
"""

import argparse
import ctypes
import random
import statistics
import time

import torch
from flashattn import _abi, _torch_ops
from flashattn.torch import attention, install, scaled_dot_product_attention, uninstall

CALLS = 50  # between two readings of the clock


def c_calls(device, q):
    """fa_forward and fa_backward of a problem with q for everything, by name."""
    view, lib = _torch_ops._viewer(q.device), _abi.lib
    problem, gradients = _abi.fa_attention(
        ctypes.sizeof(_abi.fa_attention)
    ), _abi.fa_gradients(ctypes.sizeof(_abi.fa_gradients))
    results = [torch.empty_like(q) for _ in range(4)]
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    problem.q = problem.k = problem.v = gradients.dout = view(q, "q")
    problem.out, gradients.dq, gradients.dk, gradients.dv = (
        view(x, "result") for x in results
    )
    problem.lse = view(lse, "lse")
    handle, stream = _torch_ops._context(q.device)._handle, _torch_ops._stream(q.device)
    arguments = ctypes.byref(problem), ctypes.byref(gradients)
    kept = problem, gradients, results, lse
    return {
        "fa_forward": lambda kept=kept: lib.fa_forward(
            handle, arguments[0], None, 0, stream
        ),
        "fa_backward": lambda kept=kept: lib.fa_backward(
            handle, *arguments, None, 0, stream
        ),
    }


def contenders(device):
    """By name: functions of no arguments, and whether they are for PyTorch with the library installed."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rows = 1 if device == "cpu" else 64
    plain = [torch.randn(1, 1, rows, 64, device=device, dtype=dtype) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in plain]
    rows_first = [x.transpose(1, 2) for x in plain]
    dout = torch.ones_like(plain[0])
    result = {
        name: (run, False) for name, run in c_calls(device, rows_first[0]).items()
    }
    operators = (
        torch.ops.flashattn.forward.default,
        torch.ops.flashattn.backward.default,
    )
    out, lse = operators[0](*rows_first)
    arguments = (
        dout.transpose(1, 2),
        None,
        out,
        lse,
        (True, True, True, False, False),
        *rows_first,
    )
    result["operator, forward"] = (lambda: operators[0](*rows_first), False)
    result["operator, backward"] = (lambda: operators[1](*arguments), False)

    def with_gradients(name, run, given, dout, installed=False):
        out = run(*given)
        result[f"{name}, forward that saves for backward"] = (
            lambda: run(*given),
            installed,
        )
        result[f"{name}, backward"] = (
            lambda: torch.autograd.grad(out, given, dout, retain_graph=True),
            installed,
        )

    result["attention, forward"] = (lambda: attention(*rows_first), False)
    with_gradients(
        "attention",
        attention,
        [x.transpose(1, 2).detach().requires_grad_() for x in plain],
        dout.transpose(1, 2),
    )
    result["drop-in, forward"] = (lambda: scaled_dot_product_attention(*plain), False)
    with_gradients("drop-in", scaled_dot_product_attention, leaves, dout)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for name, installed in (
        ("PyTorch", False),
        *([("installed", True)] if device in install().devices else []),
    ):
        result[f"{name}, forward"] = (lambda: sdpa(*plain), installed)
        with_gradients(name, sdpa, leaves, dout, installed)
    uninstall()
    return result


def measure(functions, device, rounds):
    """Microseconds of each call, a list for each function."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            run, installed = functions[name]
            if installed:
                install()
            if device != "cpu":
                torch.cuda.synchronize()
            run()
            start = clock()
            for _ in range(CALLS):
                run()
            times[name].append((clock() - start) / CALLS * 1e6)
            if installed:
                uninstall()
    return times


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'PyTorch ' + torch.__version__ + ', ' + arguments.device:44s} {'min':>7s} {'median':>7s}  us"
    )
    print(
        "operators: "
        + (
            f"extension {_torch_ops.extension.path}"
            if _torch_ops.extension
            else f"ctypes, {_torch_ops.extension.reason}"
        )
    )
    for name, times in measure(
        contenders(arguments.device), arguments.device, arguments.rounds
    ).items():
        print(f"{name:44s} {min(times):7.1f} {statistics.median(times):7.1f}")


if __name__ == "__main__":
    main()
