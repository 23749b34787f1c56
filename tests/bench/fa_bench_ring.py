#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""flashattn.distributed beside a ring written in PyTorch, forward and backward, one process a GPU.

    PYTHONPATH=bindings/python FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_bench_ring.py --rows 16384,65536

The ring cuts one causal sequence zigzag, sends keys and values to the next rank while it computes (batch_isend_irecv), calls PyTorch's attention operators without
autograd, merges in fp32, and lets fp32 gradients of keys go round. 64 query heads, 8 key heads, head_dim 128, bf16. Results of all contenders are compared before
they are timed. They run in a new random order each round; times are medians, of the slowest rank.
"""

import argparse
import os
import random
import statistics

import torch
import torch.distributed as dist
import torch.multiprocessing
from flashattn.distributed import Plan, Ranks

HEADS_Q, HEADS_K, HEAD_DIM = 64, 8, 128
aten = torch.ops.aten


class Cudnn:
    name = "ring with cuDNN"

    def forward(self, q, k, v, causal):
        out, lse, *rest = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return out, lse.reshape(q.shape[:3]), (lse.shape, rest)

    def backward(self, dout, q, k, v, out, lse, saved, causal):
        shape, (cu_q, cu_k, _, _, seed, offset, _) = saved
        lse = lse.reshape(*lse.shape, *shape[3:]).contiguous()
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, q.shape[2], k.shape[2], 0.0, causal
        )


class Flash:
    name = "ring with PyTorch's FlashAttention-2 (its default)"

    def forward(self, q, k, v, causal):
        out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        return out, lse, rest

    def backward(self, dout, q, k, v, out, lse, saved, causal):
        cu_q, cu_k, _, _, seed, offset, _ = saved
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), cu_q, cu_k, q.shape[2], k.shape[2], 0.0, causal, seed, offset
        )


class Ring:
    """The zigzag pieces of a rank, (1, heads, rows, head_dim), and the ring over them."""

    def __init__(self, kernels, rank, world):
        self.kernels, self.rank, self.world = kernels, rank, world

    def start_swap(self, tensors):
        """Sends tensors to the next rank and receives those of the one before."""
        received = [torch.empty_like(x) for x in tensors]
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        moves = [dist.P2POp(dist.isend, x, after) for x in tensors] + [dist.P2POp(dist.irecv, x, before) for x in received]
        return received, dist.batch_isend_irecv(moves)

    def seen(self, step, rows):
        """The queries and the keys of a step, and whether they are the rank's own."""
        source, half = (self.rank - step) % self.world, rows // 2
        if source == self.rank:
            return slice(None), slice(None), True
        return (slice(None), slice(0, half), False) if source < self.rank else (slice(half, None), slice(None), False)

    def steps(self, k, v):
        for step in range(self.world):
            if step + 1 < self.world:
                (next_k, next_v), moves = self.start_swap([k, v])
            yield step, k, v
            if step + 1 < self.world:
                for move in moves:
                    move.wait()
                k, v = next_k, next_v

    def forward(self, q, k, v):
        saved = []
        for step, k_here, v_here in self.steps(k, v):
            rows, keys, causal = self.seen(step, q.shape[2])
            part, part_lse, rest = self.kernels.forward(q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys], causal)
            saved.append(rest)
            if step == 0:
                out, lse = part.float(), part_lse.clone()
                continue
            share = torch.sigmoid(part_lse - lse[:, :, rows])[..., None]
            out[:, :, rows] -= share * (out[:, :, rows] - part)
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
        return out.to(q.dtype), lse, saved

    def backward(self, dout, q, k, v, out, lse, saved):
        dq = torch.zeros_like(q, dtype=torch.float32)
        dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        moves = []
        for step, k_here, v_here in self.steps(k, v):
            rows, keys, causal = self.seen(step, q.shape[2])
            parts = self.kernels.backward(
                dout[:, :, rows],
                q[:, :, rows],
                k_here[:, :, keys],
                v_here[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                saved[step],
                causal,
            )
            dq[:, :, rows] += parts[0]
            for move in moves:
                move.wait()
            if step > 0:
                dk, dv = received
            dk[:, :, keys] += parts[1]
            dv[:, :, keys] += parts[2]
            received, moves = self.start_swap([dk, dv])
        for move in moves:
            move.wait()
        return [x.to(q.dtype) for x in (dq, *received)]


def compare(rank, world, all_rows, rounds):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29542")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    ranks = Ranks()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def time_of(call, calls):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls

    for rows in all_rows:
        plan = Plan(
            [rows], heads_q=HEADS_Q, heads_k=HEADS_K, head_dim=HEAD_DIM, num_ranks=world, dtype=torch.bfloat16, causal=True
        )
        generator = torch.Generator(device=device).manual_seed(1)  # the same numbers on all ranks
        whole = [
            torch.randn(rows, heads, HEAD_DIM, device=device, dtype=torch.bfloat16, generator=generator)
            for heads in (HEADS_Q, HEADS_K, HEADS_K, HEADS_Q)
        ]
        *inputs, dout = (plan.scatter(x, rank) for x in whole)
        inputs = [x.requires_grad_() for x in inputs]
        sorted_rows = torch.sort(plan.rows(rank).to(device))  # the ring has the same rows, in order
        pieces = [x[sorted_rows.values].transpose(0, 1)[None] for x in whole]
        del whole
        results = {}

        def ours(backward):
            if not backward:
                results["ours"] = [ranks.attention(plan, *inputs)]
            else:
                results["ours"][1:] = torch.autograd.grad(results["ours"][0], inputs, dout, retain_graph=True)

        def ring_of(ring):
            name = ring.kernels.name

            def call(backward):
                if not backward:
                    results[name] = ring.forward(*pieces[:3])
                else:
                    out, lse, saved = results[name]
                    results[name + " gradients"] = ring.backward(pieces[3], *pieces[:3], out, lse, saved)

            return call

        contenders = {"ours": ours}
        for kernels in (Cudnn(), Flash()):
            contenders[kernels.name] = ring_of(Ring(kernels, rank, world))
        for name, call in contenders.items():
            call(False)
            call(True)
            if name == "ours":
                continue
            theirs = [results[name][0], *results[name + " gradients"]]
            for x, y in zip(theirs, results["ours"]):
                y = y.detach()[sorted_rows.indices].float()
                difference = ((x[0].transpose(0, 1) - y).norm() / y.norm()).item()
                if not difference < 2e-2:
                    raise SystemExit(f"{name}: differs by {difference:.1e} on rank {rank}")
        order = random.Random(3)  # the same on all ranks
        times = {name: ([], []) for name in contenders}
        for _ in range(rounds):
            names = list(contenders)
            order.shuffle(names)
            for name in names:
                for backward in (False, True):
                    calls = 5 if rows <= 16384 else 1
                    times[name][backward].append(time_of(lambda: contenders[name](backward), calls))
        medians = torch.tensor([[statistics.median(x) for x in times[name]] for name in contenders], device=device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        if rank == 0:
            for name, ms, ratio in zip(contenders, medians.tolist(), (medians / medians[0]).tolist()):
                print(f"{rows} rows, {name}: {ms[0]:.2f} / {ms[1]:.2f} ms, {ratio[0]:.2f} / {ratio[1]:.2f} of ours", flush=True)
        del contenders, results, inputs, pieces
        torch.cuda.empty_cache()
    ranks.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="16384,65536")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    torch.multiprocessing.spawn(
        compare, args=(gpus, [int(x) for x in options.rows.split(",")], options.rounds), nprocs=gpus
    )
