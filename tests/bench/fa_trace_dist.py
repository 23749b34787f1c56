#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What every GPU does in one forward and one backward over flashattn.distributed: kernels with start, duration, stream and CTAs, as text.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_trace_dist.py --rows 16384

One causal sequence of --rows rows over all GPUs, 64 query heads, 8 key heads, head_dim 128, bf16; with --whole the same on every GPU alone. Each call begins on
idle GPUs. NCCL's kernels (SendRecv) take an SM for each CTA. Times are in us since the first kernel of the forward, by torch.profiler.
"""

import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from flashattn.distributed import Plan, Ranks
from flashattn.torch import attention
from torch.profiler import ProfilerActivity, profile

HEADS_Q, HEADS_K, HEAD_DIM = 64, 8, 128


def short_name(name):
    for noise in ("void ", "fa::cuda::", "(anonymous namespace)::"):
        name = name.replace(noise, "")
    return name.split("(")[0].split("<")[0]


def kernels(session):
    """The kernels and copies that a profiler saw, but PyTorch's own, by start."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        session.export_chrome_trace(file.name)
        with open(file.name, encoding="utf-8") as text:
            events = json.load(text)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    ours = [e for e in events if e.get("cat") in kinds and "elementwise" not in e["name"] and "AllReduce" not in e["name"]]
    return sorted(ours, key=lambda e: e["ts"])


def trace(rank, world, rows, whole):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    plan = Plan(
        [rows], heads_q=HEADS_Q, heads_k=HEADS_K, head_dim=HEAD_DIM, num_ranks=world, dtype=torch.bfloat16, causal=True
    )
    ranks = Ranks()
    own = rows if whole else len(plan.rows(rank))
    q, k, v = (torch.randn(own, h, HEAD_DIM, device=device, dtype=torch.bfloat16) for h in (HEADS_Q, HEADS_K, HEADS_K))
    if whole:
        q, k, v = q[None], k[None], v[None]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)

    def together():
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def call():
        together()
        out = attention(*leaves, causal=True) if whole else ranks.attention(plan, *leaves)
        together()
        torch.autograd.grad(out, leaves, dout)

    for _ in range(3):
        call()
    together()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        call()
        torch.cuda.synchronize()
    for speaker in range(world):
        if speaker == rank:
            seen = kernels(session)
            print(f"rank {rank}: start, us | duration, us | stream | CTAs | kernel")
            for e in seen:
                arguments = e.get("args", {})
                grid = arguments.get("grid", ["-"])[0]
                print(
                    f"{e['ts'] - seen[0]['ts']:10.1f} {e['dur']:9.1f} {arguments.get('stream', '-'):>5} {grid:>6}"
                    f"  {short_name(e['name'])}",
                    flush=True,
                )
        together()
    ranks.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    torch.multiprocessing.spawn(trace, args=(gpus, options.rows, options.whole), nprocs=gpus)
