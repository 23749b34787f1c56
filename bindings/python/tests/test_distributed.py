# SPDX-License-Identifier: Apache-2.0
"""flashattn.distributed over two gloo processes on the CPU, against attention over whole documents in fp64; and one of the processes killed.

FLASHATTN_TEST_GROUP=nccl runs the processes on two GPUs instead.
"""

import multiprocessing
import os
import signal
import tempfile
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest("PyTorch is not installed") from error

import torch.distributed as dist

import flashattn
from flashattn.distributed import Plan, Ranks

GLOO = dist.is_available() and dist.is_gloo_available()
GROUP = os.environ.get("FLASHATTN_TEST_GROUP", "gloo")
DEVICE = "cuda" if GROUP == "nccl" else "cpu"  # the current one of a process
RANKS, HEADS_Q, HEADS_K, DIM, DIM_V = 2, 4, 2, 16, 12
LENGTHS = [90, 7, 40]
SECONDS = 60  # until a process counts as hung


def plan_of(way="auto", **options):
    shape = {"heads_q": HEADS_Q, "heads_k": HEADS_K, "head_dim": DIM, "head_dim_v": DIM_V, "num_ranks": RANKS}
    return Plan(LENGTHS, way=way, **shape, **options)


def inputs(seed):
    """q, k, v, sink and the gradients of out and lse for all rows, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(LENGTHS)
    shapes = (
        (rows, HEADS_Q, DIM),
        (rows, HEADS_K, DIM),
        (rows, HEADS_K, DIM_V),
        (HEADS_Q,),
        (rows, HEADS_Q, DIM_V),
        (HEADS_Q, rows),
    )
    return [torch.randn(shape, generator=generator) for shape in shapes]


def reference(tensors, causal, window, softcap, with_sink):
    """out, lse and the gradients of q, k, v and sink, in fp64, one document after another."""
    q, k, v, sink, dout, dlse = (x.double() for x in tensors)
    given = [x.requires_grad_() for x in (q, k, v, sink)]
    outs, lses, first = [], [], 0
    for rows in LENGTHS:
        part = slice(first, first + rows)
        first += rows
        keys, values = (x[part].repeat_interleave(HEADS_Q // HEADS_K, 1) for x in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q[part], keys) / DIM**0.5
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        i, j = torch.arange(rows)[:, None], torch.arange(rows)[None]
        visible = (j <= i) if causal else torch.ones(rows, rows, dtype=torch.bool)
        if window[0] is not None:
            visible = visible & (j >= i - window[0])
        logits = logits.masked_fill(~visible, -torch.inf)
        if with_sink:
            logits = torch.cat([logits, sink[:, None, None].expand(HEADS_Q, rows, 1)], -1)
        lses.append(logits.logsumexp(-1))
        outs.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1)[..., :rows], values))
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    used = given if with_sink else given[:3]
    return out, lse, *torch.autograd.grad([out, lse], used, [dout, dlse])


#: way, options of the plan, options of the call
CASES = [
    ("auto", {"causal": True}, {}),
    ("ring", {"causal": True}, {"sink": True, "softcap": 3.0}),
    ("all_to_all", {"causal": True}, {"sink": True}),
    ("gather", {}, {"sink": True}),
    ("gather", {"causal": True, "window": (11, None)}, {}),
    ("auto", {"causal": True, "contiguous": True}, {"deterministic": True}),
]


def join(rank, folder):
    torch.set_num_threads(1)
    if GROUP == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(GROUP, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)


def compute(rank, folder, seed):
    """Leaves this rank's results of every case, twice each: the second call of a kind is not prepared again."""
    join(rank, folder)
    results = []
    with Ranks(timeout=SECONDS) as ranks:
        for way, of_plan, of_call in CASES:
            plan = plan_of(way, **of_plan)
            for again in range(2):
                q, k, v, sink, dout, dlse = inputs(seed + again)
                given = [plan.scatter(x, rank).to(DEVICE).requires_grad_() for x in (q, k, v)]
                options = {**of_call}
                if options.get("sink"):
                    options["sink"] = sink.to(DEVICE).requires_grad_()
                out, lse = ranks.attention(plan, *given, **options, return_lse=True)
                used = given + ([options["sink"]] if options.get("sink") is not None else [])
                incoming = [plan.scatter(dout, rank).to(DEVICE), plan.scatter(dlse, rank, 1).to(DEVICE)]
                results.append([x.detach().cpu() for x in (out, lse, *torch.autograd.grad([out, lse], used, incoming))])
                with torch.no_grad():
                    results[-1].append(ranks.attention(plan, *given, **options).cpu())
        ranks.status()
    torch.save(results, f"{folder}/results{rank}")
    dist.destroy_process_group()


def differ(rank, folder):
    """The ranks do not agree on softcap; afterwards they do."""
    join(rank, folder)
    plan = plan_of(causal=True)
    q, k, v = (plan.scatter(x, rank).to(DEVICE) for x in inputs(5)[:3])
    with Ranks(timeout=SECONDS) as ranks:
        try:
            ranks.attention(plan, q, k, v, softcap=float(rank))
            text = "no error"
        except flashattn.Error as error:
            text = str(error)
        ranks.attention(plan, q, k, v)
    torch.save(text, f"{folder}/results{rank}")
    dist.destroy_process_group()


def die(rank, folder):
    """Rank 1 is killed between forward and backward."""
    join(rank, folder)
    plan = plan_of(causal=True)
    given = [plan.scatter(x, rank).requires_grad_() for x in inputs(6)[:3]]
    with Ranks(timeout=SECONDS / 3) as ranks:
        out = ranks.attention(plan, *given)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = []
        for use in (lambda: out.sum().backward(), ranks.status, lambda: ranks.attention(plan, *given)):
            try:
                use()
                seen.append("no error")
            except flashattn.Error as error:
                seen.append(error.name)
    torch.save(seen, f"{folder}/results{rank}")


@unittest.skipUnless(GLOO, "this PyTorch has no gloo")
@unittest.skipIf(GROUP == "nccl" and torch.cuda.device_count() < RANKS, "fewer GPUs than ranks")
class RanksTest(unittest.TestCase):
    def run_ranks(self, body, *arguments, expected=(0, 0)):
        """What each process leaves behind; None for one that left nothing."""
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            processes = [context.Process(target=body, args=(rank, folder, *arguments)) for rank in range(RANKS)]
            for process in processes:
                process.start()
            for process in processes:
                process.join(SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()
            self.assertEqual(tuple(process.exitcode for process in processes), expected)
            names = [f"{folder}/results{rank}" for rank in range(RANKS)]
            return [torch.load(name) if os.path.exists(name) else None for name in names]

    def test_like_one_rank(self):
        seed = int.from_bytes(os.urandom(3), "little")
        results = self.run_ranks(compute, seed)
        number = 0
        for way, of_plan, of_call in CASES:
            plan = plan_of(way, **of_plan)
            self.assertLess(sum(piece.whole for piece in plan.pieces), len(plan.pieces))
            for again in range(2):
                with self.subTest(way=way, plan=of_plan, call=of_call, seed=seed + again):
                    causal, window = of_plan.get("causal", False), of_plan.get("window", (None, None))
                    expected = reference(inputs(seed + again), causal, window, of_call.get("softcap", 0), "sink" in of_call)
                    for n, theirs in enumerate((*expected, expected[0])):
                        parts = [results[rank][number][n] for rank in range(RANKS)]
                        if theirs.dim() == 1:  # of sink: the sum, on every rank
                            self.assertTrue(torch.equal(parts[0], parts[1]))
                            ours = parts[0]
                        else:
                            ours = plan.gather(parts, 1 if n == 1 else 0)
                        torch.testing.assert_close(ours.double(), theirs, rtol=3e-5, atol=3e-5)
                number += 1

    def test_ranks_that_differ(self):
        for text in self.run_ranks(differ):
            self.assertRegex(text, "softcap is 0 on rank 0 and 1 on rank 1")

    @unittest.skipIf(GROUP == "nccl", "NCCL notices a dead process late")
    def test_a_killed_rank(self):
        results = self.run_ranks(die, expected=(0, -signal.SIGKILL))
        self.assertEqual(results[0], ["FA_ERROR_TRANSPORT"] * 3)


@unittest.skipUnless(GLOO, "this PyTorch has no gloo")
class OneRankTest(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)

    def test_what_is_refused(self):
        with self.assertRaisesRegex(ValueError, "device is cuda:0, for which the group has"):
            Ranks(device="cuda:0")
        with self.assertRaisesRegex(ValueError, "device is meta"):
            Ranks(device="meta")
        ranks, plan = Ranks(), plan_of(causal=True)
        q, k, v = inputs(1)[:3]
        with self.assertRaisesRegex(flashattn.Error, "layout has 2 ranks"):
            ranks.attention(plan, q, k, v)
        alone = Plan(LENGTHS, heads_q=HEADS_Q, heads_k=HEADS_K, head_dim=DIM, head_dim_v=DIM_V, num_ranks=1)
        with self.assertRaisesRegex(flashattn.Error, r"q.shape\[0\]"):
            ranks.attention(alone, q[1:], k, v)
        ranks.abort()
        with self.assertRaisesRegex(flashattn.Error, "fa_dist_abort"):
            ranks.status()
        ranks.close()
        with self.assertRaisesRegex(ValueError, "the ranks are closed"):
            ranks.status()


class PlanTest(unittest.TestCase):
    def test_rows_go_there_and_back(self):
        plan = plan_of(causal=True)
        whole = torch.randn(sum(LENGTHS), 3)
        parts = [plan.scatter(whole, rank) for rank in range(RANKS)]
        self.assertTrue(torch.equal(plan.gather(parts), whole))
        self.assertTrue(torch.equal(plan.gather([part.T for part in parts], 1), whole.T))
        for piece in plan.pieces:
            first = sum(LENGTHS[: piece.document])
            rows = slice(piece.local_row, piece.local_row + piece.row_end - piece.row_begin)
            self.assertTrue(torch.equal(parts[piece.rank][rows], whole[first + piece.row_begin : first + piece.row_end]))
        self.assertEqual(sum(piece.row_end - piece.row_begin for piece in plan.pieces), plan.total_rows)
        self.assertEqual((plan.num_ranks, plan.way), (RANKS, "gather"))
        self.assertLessEqual(plan.imbalance, 33 / 32)

    def test_what_is_refused(self):
        with self.assertRaisesRegex(ValueError, "way is 'star'"):
            plan_of("star")
        with self.assertRaisesRegex(flashattn.Error, "heads_k"):
            Plan(LENGTHS, heads_q=4, heads_k=3, head_dim=8, num_ranks=2)
        with self.assertRaisesRegex(OverflowError, "num_ranks"):
            Plan(LENGTHS, heads_q=4, heads_k=2, head_dim=8, num_ranks=2**40)
        plan = plan_of()
        with self.assertRaisesRegex(ValueError, "rank is 2"):
            plan.scatter(torch.zeros(sum(LENGTHS)), 2)
        with self.assertRaisesRegex(ValueError, "whole has 5 rows in dimension 0; the plan has 137"):
            plan.scatter(torch.zeros(5), 0)
        with self.assertRaisesRegex(ValueError, "parts have"):
            plan.gather([torch.zeros(1), torch.zeros(2)])
        with self.assertRaisesRegex(RuntimeError, "there is no process group"):
            Ranks()


if __name__ == "__main__":
    unittest.main()
