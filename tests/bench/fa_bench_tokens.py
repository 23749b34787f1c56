#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of two models with PyTorch's attention, and with the library under it after flashattn.torch.install().

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_bench_tokens.py --device cuda

The models have the shapes of GPT-2 with 124M parameters (12 layers, 12 heads of 64 columns) and of Llama 3.2 with 1B (16 layers, 32 heads and
8 KV heads of 64 columns), random parameters, in bf16. A training step is forward, loss, backward, without an optimiser; a prefill is forward alone.
Each batch has --tokens tokens in sequences of each length. The parameters, and with --compile the compiled model, are the same for all
contenders, which run interleaved in random order; times are medians. --flash adds PyTorch held to its own flash attention, which it chooses by
itself where it does not prefer cuDNN. --small: two narrow layers, to see that the script works.
"""

import argparse
import contextlib
import random
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from flashattn.torch import fallbacks, install, uninstall
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # columns of the feed-forward network
    vocabulary: int
    gated: bool  # Llama's feed-forward network and rotary embedding, GPT-2's without

    @property
    def width(self):
        return self.heads * self.head_dim


MODELS = {
    "GPT 124M": Shape(12, 12, 12, 64, 3072, 50304, False),
    "Llama 1B": Shape(16, 32, 8, 64, 8192, 128256, True),
}
SMALL = {
    "GPT 124M": Shape(2, 2, 2, 64, 256, 512, False),
    "Llama 1B": Shape(2, 4, 2, 64, 256, 512, True),
}


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        width, kv_width = shape.width, shape.kv_heads * shape.head_dim
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.qkv = nn.Linear(width, width + 2 * kv_width, bias=not shape.gated)
        self.out = nn.Linear(width, width, bias=not shape.gated)
        self.up = nn.Linear(width, shape.inner * (2 if shape.gated else 1), bias=not shape.gated)
        self.down = nn.Linear(shape.inner, width, bias=not shape.gated)

    def forward(self, x, rotation):
        s = self.shape
        batch, rows, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, rows, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if s.gated:
            q, k = rotated(q, rotation), rotated(k, rotation)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, rows, width))
        inner = self.up(self.norms[1](x))
        if s.gated:
            gate, inner = inner.tensor_split(2, dim=-1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner)
        return x + self.down(inner)


def rotated(x, rotation):
    cosine, sine = rotation
    first, second = x.tensor_split(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Model(nn.Module):
    def __init__(self, shape, longest):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(longest, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width)

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=x.device)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(positions)
        else:
            half = self.shape.head_dim // 2
            angles = positions[:, None] * 500000.0 ** (-torch.arange(half, device=x.device) / half)
            rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)
        if targets is None:  # the next token alone
            return F.linear(x[:, -1], self.tokens.weight)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1).float(), targets.flatten())


def train(model, tokens):
    model.zero_grad(set_to_none=True)
    model(tokens, tokens).backward()


def prefill(model, tokens):
    with torch.no_grad():
        model(tokens)


def measure(step, model, tokens, contenders, device, seconds, refused):
    """Seconds of a step by contender, a list for each. Why calls went to PyTorch's kernel is added to `refused`."""
    times = {name: [] for name in contenders}

    def run(name):
        if name == "libflashattn":
            install()
        held = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == "flash" else contextlib.nullcontext()
        started = time.perf_counter()
        with held:
            step(model, tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        refused.update(fallbacks())
        uninstall()
        return elapsed

    order = list(times)
    for _ in range(2):  # compiles, and fills caches
        for name in order:
            run(name)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["PyTorch"]) < 3:
        random.shuffle(order)
        for name in order:
            times[name].append(run(name))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch (16384)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row (3)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--flash", action="store_true", help="also PyTorch with flash attention alone")
    parser.add_argument("--small", action="store_true", help="two narrow layers")
    arguments = parser.parse_args()
    state = install()
    uninstall()
    if arguments.device not in state.devices:
        raise SystemExit(f"install() does not serve {arguments.device}: {state.reason}")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(
        f"{name}, PyTorch {torch.__version__}, {'compiled' if arguments.compile else 'not compiled'}, bf16, {arguments.tokens} tokens a batch"
    )
    others = ["PyTorch", *(["flash"] if arguments.flash else [])]
    columns = ["model", "step", "rows", "libflashattn, tokens/s", *(f"{name}, tokens/s; times" for name in others)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    refused = set()
    for title in arguments.models:
        shape = (SMALL if arguments.small else MODELS)[title]
        torch.manual_seed(1)
        model = Model(shape, max(arguments.lengths)).to(arguments.device, torch.bfloat16)
        run = torch.compile(model) if arguments.compile else model
        run.zero_grad = model.zero_grad
        for length in arguments.lengths:
            tokens = torch.randint(shape.vocabulary, (max(arguments.tokens // length, 1), length), device=arguments.device)
            for step in (train, prefill):
                times = measure(step, run, tokens, ["libflashattn", *others], arguments.device, arguments.seconds, refused)
                rates = {name: tokens.numel() / statistics.median(each) for name, each in times.items()}
                ours = rates["libflashattn"]
                cells = [title, step.__name__, length, f"{ours:.0f}", *(f"{rates[n]:.0f}; {ours / rates[n]:.2f}" for n in others)]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for reason in sorted(refused):
        print(f"PyTorch's kernel was used for some calls: {reason}")


if __name__ == "__main__":
    main()
