#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of flashattn.jax beside jax.nn.dot_product_attention: causal, 8 heads of 128 columns, one sequence, medians of interleaved calls under jit.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so FLASHATTN_JAX_EXTENSION=libflashattn_jax.so tests/bench/fa_bench_jax.py
"""

import random
import statistics
import time

import jax
import jax.numpy as jnp
from flashattn.jax import dot_product_attention, extension

ROUNDS = 9


def contenders():
    """By name: forward, and the gradients of q, k and v, under jit."""
    result = {}
    for name, function in (("libflashattn", dot_product_attention), ("JAX", jax.nn.dot_product_attention)):

        def forward(q, k, v, function=function):
            return function(q, k, v, is_causal=True)

        def loss(q, k, v, forward=forward):
            return (forward(q, k, v).astype(jnp.float32) ** 2).sum()

        result[name] = {"forward": jax.jit(forward), "with gradients": jax.jit(jax.grad(loss, (0, 1, 2)))}
    return result


def main():
    print(f"{jax.devices()[0]}, JAX {jax.__version__}; {'extension' if extension else extension.reason}")
    for dtype in (jnp.float32, jnp.bfloat16):
        for rows in (512, 2048):
            inputs = [jax.random.normal(key, (1, rows, 8, 128), dtype) for key in jax.random.split(jax.random.PRNGKey(0), 3)]
            functions = contenders()
            for step in ("forward", "with gradients"):
                times = {name: [] for name in functions}
                for name in functions:
                    jax.block_until_ready(functions[name][step](*inputs))
                for _ in range(ROUNDS):
                    for name in random.sample(list(functions), len(functions)):
                        start = time.perf_counter()
                        jax.block_until_ready(functions[name][step](*inputs))
                        times[name].append((time.perf_counter() - start) * 1e3)
                ours, theirs = (statistics.median(times[name]) for name in ("libflashattn", "JAX"))
                print(f"{dtype.__name__:9s} {rows:5d} {step:14s} {ours:8.2f} ms, JAX {theirs:8.2f} ms: {theirs / ours:.2f}", flush=True)


if __name__ == "__main__":
    main()
