# SPDX-License-Identifier: Apache-2.0
"""flashattn.distributed over two and three gloo processes on the CPU, against attention over whole documents in fp64, and with dropout against one device;
and one of the processes killed.

FLASHATTN_TEST_GROUP=nccl runs the processes on GPUs instead, on three where there are as many.
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
from torch.utils.checkpoint import checkpoint

import flashattn
from flashattn.distributed import Plan, Ranks

GLOO = dist.is_available() and dist.is_gloo_available()
GROUP = os.environ.get("FLASHATTN_TEST_GROUP", "gloo")
DEVICE = "cuda" if GROUP == "nccl" else "cpu"  # the current one of a process
RANKS, HEADS_Q, HEADS_K, DIM, DIM_V = 2, 4, 2, 16, 12
LENGTHS = [90, 7, 40]
SECONDS = 60  # until a process counts as hung


def plan_of(way="auto", lengths=LENGTHS, num_ranks=RANKS, heads=(HEADS_Q, HEADS_K), **options):
    shape = {"heads_q": heads[0], "heads_k": heads[1], "head_dim": DIM, "head_dim_v": DIM_V, "num_ranks": num_ranks}
    return Plan(lengths, way=way, **shape, **options)


def inputs(seed, lengths=LENGTHS, heads=(HEADS_Q, HEADS_K)):
    """q, k, v, sink and the gradients of out and lse for all rows, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    rows, (heads_q, heads_k) = sum(lengths), heads
    shapes = (
        (rows, heads_q, DIM),
        (rows, heads_k, DIM),
        (rows, heads_k, DIM_V),
        (heads_q,),
        (rows, heads_q, DIM_V),
        (heads_q, rows),
    )
    return [torch.randn(shape, generator=generator) for shape in shapes]


def biases_of(seed, lengths, heads):
    """A bias for each document, the same in every process. Some pairs are masked, but none of a row with itself."""
    generator = torch.Generator().manual_seed(seed + 1)
    biases = [torch.randn(1, heads, rows, rows, generator=generator) for rows in lengths]
    masked = [
        (torch.rand(bias.shape, generator=generator) < 0.1) & ~torch.eye(bias.shape[-1], dtype=torch.bool) for bias in biases
    ]
    return [bias.masked_fill(mask, -torch.inf) for bias, mask in zip(biases, masked)]


def reference(tensors, causal, window, softcap, with_sink, lengths=LENGTHS, biases=None):
    """out, lse and the gradients of q, k, v, sink and biases, in fp64, one document after another."""
    q, k, v, sink, dout, dlse = (x.double() for x in tensors)
    given = [x.requires_grad_() for x in (q, k, v, sink)]
    biases = [] if biases is None else [bias.double().requires_grad_() for bias in biases]
    outs, lses, first = [], [], 0
    for number, rows in enumerate(lengths):
        part = slice(first, first + rows)
        first += rows
        keys, values = (x[part].repeat_interleave(HEADS_Q // HEADS_K, 1) for x in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q[part], keys) / DIM**0.5
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if biases:
            logits = logits + biases[number][0]
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
    used = (given if with_sink else given[:3]) + biases
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


def join(rank, folder, num_ranks=RANKS):
    torch.set_num_threads(1)
    if GROUP == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(GROUP, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)


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


#: Of dropout: the way, whether documents are long enough for cuts that the plan puts at multiples of 16, its options, where the seed comes from, and
#: whether there is a bias.
DROPOUT = [
    ("auto", True, {"causal": True}, "number", False),
    ("ring", False, {"contiguous": True}, "tensor", False),
    ("all_to_all", False, {"causal": True}, "number", False),
    ("gather", False, {"contiguous": True, "causal": True, "num_stages": 1}, "number", True),
    ("gather", False, {"contiguous": True, "causal": True, "window": (30, None)}, "drawn", False),
]
DROPPED, OFFSET = 0.3, 2**40 + 5


def dropout_problem(case, num_ranks, seed):
    """The plan, inputs and bias of each document of a case."""
    way, is_long, of_plan, _, with_bias = case
    heads = (2 * num_ranks, num_ranks)
    if way == "all_to_all":
        lengths = LENGTHS
    elif is_long:
        lengths = [800 * num_ranks, 16, 224 * num_ranks - 16]
    else:  # contiguous rows of 64 for each rank
        lengths = [112, 64 * num_ranks - 112]
    plan = plan_of(way, lengths, num_ranks, heads, **of_plan)
    return plan, inputs(seed, lengths, heads), biases_of(seed, lengths, 1) if with_bias else None


def dropout_seed(source, seed, again):
    return 2**64 - 1 - seed if source == "number" and not again else seed + again


def drop(ranks, seed):
    """Results of every case twice, by two seeds. Ranks other than 0 give seeds that must have no effect."""
    results = []
    for case in DROPOUT:
        plan, (q, k, v, _, dout, dlse), biases = dropout_problem(case, ranks.num_ranks, seed)
        for again in range(2):
            given = [plan.scatter(x, ranks.rank).to(DEVICE).requires_grad_() for x in (q, k, v)]
            options = {"dropout_p": DROPPED}
            if biases is not None:
                options["bias"] = plan.scatter_bias(biases, ranks.rank).to(DEVICE).requires_grad_()
                given.append(options["bias"])
            source = case[3]
            if source == "drawn":
                torch.manual_seed(seed + again + ranks.rank)
            else:
                number = dropout_seed(source, seed, again) - ranks.rank
                options["dropout_seed"] = number if source == "number" else torch.tensor([number], device=DEVICE)
                options["dropout_offset"] = OFFSET + ranks.rank
            out, lse = ranks.attention(plan, *given[:3], **options, return_lse=True)
            incoming = [plan.scatter(dout, ranks.rank).to(DEVICE), plan.scatter(dlse, ranks.rank, 1).to(DEVICE)]
            gradients = torch.autograd.grad([out, lse], given, incoming)
            results.append([x.detach().cpu() for x in (out, lse, *gradients)])
    # The last case again, computed twice by a checkpoint. The generator then stands where one seed leaves it.
    torch.manual_seed(seed + again + ranks.rank)
    out = checkpoint(lambda *x: ranks.attention(plan, *x, **options, return_lse=True), *given, use_reentrant=False)
    again = [*out, *torch.autograd.grad(out, given, incoming)]
    return results, [x.detach().cpu() for x in again], torch.rand(3, device=DEVICE).cpu()


#: Of a bias: the way, lengths, options of the plan, its heads, and options of the call. Of three ranks the last one has none of two rows.
BIAS = [
    ("gather", LENGTHS, {"causal": True}, HEADS_Q, {}),
    ("gather", LENGTHS, {"num_stages": 1}, 1, {"sink": True}),
    ("ring", LENGTHS, {"causal": True}, 1, {"softcap": 3.0, "fp32_products": True}),
    ("gather", LENGTHS, {"causal": True, "window": (11, None)}, HEADS_Q, {"sink": True}),
    ("auto", [2], {"causal": True}, HEADS_Q, {"sink": True}),
]


def add_bias(ranks, seed):
    """Results of every case: out, lse and the gradients of inputs, of the biases of all documents (the rank's rows of them) and of the rank's own bias;
    then out again with a bias that requires no gradient, and without gradients.
    """
    results = []
    for way, lengths, of_plan, heads, of_call in BIAS:
        plan = plan_of(way, lengths, ranks.num_ranks, **of_plan)
        q, k, v, sink, dout, dlse = inputs(seed, lengths)
        given = [plan.scatter(x, ranks.rank).to(DEVICE).requires_grad_() for x in (q, k, v)]
        options = {**of_call}
        if options.get("sink"):
            options["sink"] = sink.to(DEVICE).requires_grad_()
            given.append(options["sink"])
        biases = [bias.to(DEVICE).requires_grad_() for bias in biases_of(seed, lengths, heads)]
        bias = plan.scatter_bias(biases, ranks.rank)
        out, lse = ranks.attention(plan, *given[:3], bias=bias, **options, return_lse=True)
        incoming = [plan.scatter(dout, ranks.rank).to(DEVICE), plan.scatter(dlse, ranks.rank, 1).to(DEVICE)]
        *gradients, of_bias = torch.autograd.grad([out, lse], [*given, bias], incoming)
        of_biases = torch.autograd.grad(bias, biases, of_bias, materialize_grads=True)
        fixed = ranks.attention(plan, *given[:3], bias=bias.detach(), **options)
        torch.autograd.grad(fixed.sum(), given)
        with torch.no_grad():
            plain = ranks.attention(plan, *given[:3], bias=bias, **options)
        results.append([x.detach().cpu() for x in (out, lse, *gradients, *of_biases, of_bias, fixed, plain)])
    return results


#: Of decoding: rows of queries, dtype, dtype of the cache, its layout, and options. "equal" has as many rows of each sequence on a rank, on rank 0 none.
#: In "causal" and "tree" the queries are new tokens, whose rows are the last ones of the last rank; that rank masks.
DECODE = [
    (1, torch.float32, torch.float32, "equal", {}),
    (3, torch.float32, torch.float32, "padded", {"scale": 0.3}),
    (2, torch.float32, torch.float32, "paged", {"softcap": 4.0, "sink": True}),
    (1, torch.bfloat16, torch.bfloat16, "paged", {"sink": True, "num_splits": 2, "batch_invariant": True}),
    (1, torch.float32, torch.int8, "padded", {"scale": 0.2}),
    (1, torch.bfloat16, torch.int8, "paged", {}),
    (3, torch.float32, torch.float32, "causal", {}),
    (3, torch.float32, torch.float32, "tree", {"sink": True}),
]
#: Of three new tokens: which they see. The second and the third both follow the first.
TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
CACHED = [41, 5, 23]  # rows of each sequence on all ranks
PAGE, START = 4, 2


def decode_inputs(case, num_ranks, seed):
    """Queries, rows of keys and of values of each sequence, sink, descales, and the rank that has each row. Of sequence 1 only the last rank has any."""
    rows, dtype, of_cache, layout, _ = case
    generator = torch.Generator().manual_seed(seed)
    batch, cached = len(CACHED), [5] * len(CACHED) if layout in ("equal", "causal", "tree") else CACHED
    q = torch.randn(batch, rows, HEADS_Q, DIM, generator=generator).to(dtype)
    caches = []
    for dim in (DIM, DIM_V):
        whole = [torch.randn(count, HEADS_K, dim, generator=generator) for count in cached]
        caches.append(
            [(x * 40).round().clamp(-127, 127).to(of_cache) if of_cache == torch.int8 else x.to(of_cache) for x in whole]
        )
    sink = torch.randn(HEADS_Q, generator=generator)
    descales = [torch.rand(batch, HEADS_K, generator=generator) / 40 for _ in caches]
    if layout == "equal":
        owners = [torch.arange(count) % (num_ranks - 1) + 1 for count in cached]
    elif layout in ("causal", "tree"):
        owners = [torch.tensor([0, num_ranks - 2, *[num_ranks - 1] * rows]) for _ in cached]
    else:  # rank 0 has about half of the rows
        owners = [(torch.randint(2 * num_ranks, (count,), generator=generator) - num_ranks).clamp(min=0) for count in cached]
        owners[1].fill_(num_ranks - 1)
    return q, *caches, sink, descales, owners


def cache_of(parts, layout, spare):
    """A cache of these rows of each sequence, and what says where they are. Rows that nobody may read are NaN; there are some more if `spare`."""
    counts, like = [len(part) for part in parts], parts[0]

    def unwritten(*shape):
        return like.new_full((*shape, *like.shape[1:]), 77 if like.dtype == torch.int8 else torch.nan)

    if layout in ("equal", "causal", "tree"):
        return torch.stack(parts), {}
    if layout == "padded":
        cache = unwritten(len(parts), START + max(counts) + spare)
        for sequence, part in enumerate(parts):
            cache[sequence, START : START + len(part)] = part
        used = torch.tensor([START + count for count in counts])  # int64 is converted
        return cache, {"seqstart_k": [START] * len(parts), "seqused_k": used.to(DEVICE)}
    pages = [-(-count // PAGE) for count in counts]
    cache = unwritten(sum(pages) + 1 + spare, PAGE)
    table, free = [], list(range(len(cache) - 1, -1, -1))
    for part, needed in zip(parts, pages):
        row = [free.pop() for _ in range(needed)]
        for n, page in enumerate(row):
            rows = part[n * PAGE : (n + 1) * PAGE]
            cache[page, : len(rows)] = rows
        table.append(row + [10**6] * (max(pages) + 1 - needed))
    return cache, {"page_table": torch.tensor(table, dtype=torch.int32, device=DEVICE), "seqused_k": counts}


def decode(ranks, seed):
    """out and lse of every case; of each again, with more memory for the cache on rank 0 alone: out, and what query_decode says."""
    results = []
    for case in DECODE:
        _, _, of_cache, layout, options = case
        q, k, v, sink, descales, owners = decode_inputs(case, ranks.num_ranks, seed)
        options = {**options}
        if options.get("sink"):
            options["sink"] = sink.to(DEVICE)
        if of_cache == torch.int8:
            options["k_descale"], options["v_descale"] = (x.to(DEVICE) for x in descales)
        if ranks.rank == ranks.num_ranks - 1:
            if layout == "causal":
                options["causal"] = True
            elif layout == "tree":
                options["element_mask"] = TREE[None, None].to(DEVICE)
        for spare in (0, 0 if ranks.rank else 3):
            (keys, where), (values, _) = (
                cache_of([part[owner == ranks.rank] for part, owner in zip(x, owners)], layout, spare) for x in (k, v)
            )
            given = (q.to(DEVICE), keys.to(DEVICE), values.to(DEVICE))
            out, lse = ranks.decode(*given, **options, **where, return_lse=True)
            results.append((out.cpu(), lse.cpu(), ranks.query_decode(*given, **options, **where)._asdict()))
        results[-1] = (ranks.decode(*given, **options, **where).cpu(), *results[-1][1:])
    return results


def decode_reference(case, num_ranks, seed):
    """out and lse in fp64."""
    rows, _, of_cache, layout, options = case
    q, k, v, sink, descales, _ = decode_inputs(case, num_ranks, seed)
    outs, lses = [], []
    for sequence, (queries, keys, values) in enumerate(zip(q.double(), k, v)):
        keys, values = keys.double(), values.double()
        if of_cache == torch.int8:
            keys, values = (x * scales[sequence].double()[:, None] for x, scales in zip((keys, values), descales))
        keys, values = (x.repeat_interleave(HEADS_Q // HEADS_K, 1) for x in (keys, values))
        logits = torch.einsum("ihd,jhd->hij", queries, keys) * options.get("scale", DIM**-0.5)
        if options.get("softcap"):
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        if layout in ("causal", "tree"):
            seen = torch.ones(rows, rows, dtype=torch.bool).tril() if layout == "causal" else TREE
            logits[..., -rows:].masked_fill_(~seen, -torch.inf)
        if options.get("sink"):
            logits = torch.cat([logits, sink.double()[:, None, None].expand(*logits.shape[:2], 1)], -1)
        lses.append(logits.logsumexp(-1))
        outs.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1)[..., : len(keys)], values))
    return torch.stack(outs), torch.stack(lses)


def query(ranks):
    """What `Ranks.query` says of forward and backward, and what the plan does."""
    plan = plan_of(num_ranks=ranks.num_ranks, causal=True)
    given = [plan.scatter(x, ranks.rank).to(DEVICE).requires_grad_() for x in inputs(3)[:3]]
    asked = [ranks.query(plan, *given, backward=backward)._asdict() for backward in (False, True)]
    return asked, (plan.forward_bytes[ranks.rank], plan.backward_bytes[ranks.rank]), plan.num_stages


def run_options(rank, folder, num_ranks, seed):
    """Leaves what dropout, biases, decoding and queries give."""
    join(rank, folder, num_ranks)
    with Ranks(timeout=SECONDS) as ranks:
        results = {"dropout": drop(ranks, seed), "bias": add_bias(ranks, seed), "decode": decode(ranks, seed)}
        results["query"] = query(ranks)
        ranks.status()
    torch.save(results, f"{folder}/results{rank}")
    dist.destroy_process_group()


def refuse(rank, folder, num_ranks):
    """The sentence of every refusal, (name, sentence); afterwards the handle works."""
    join(rank, folder, num_ranks)
    last = rank == num_ranks - 1
    said = {}

    def note(name, use):
        try:
            use()
            said[name] = "no error"
        except flashattn.Error as error:
            said[name] = str(error)

    def given(plan):
        return [plan.scatter(x, rank).to(DEVICE).requires_grad_() for x in inputs(8, plan.lengths, plan_heads)[:3]]

    with Ranks(timeout=SECONDS) as ranks:
        plan_heads = (2 * num_ranks, num_ranks)
        plans = {
            "plain": plan_of("auto", LENGTHS, num_ranks, plan_heads, causal=True),
            "all_to_all": plan_of("all_to_all", LENGTHS, num_ranks, plan_heads, causal=True),
            "two stages": plan_of("gather", LENGTHS, num_ranks, plan_heads, causal=True, num_stages=2),
            "aligned": plan_of("gather", [112, 64 * num_ranks - 112], num_ranks, plan_heads, contiguous=True),
        }

        def attention(name, **options):
            return lambda: ranks.attention(plans[name], *given(plans[name]), **options)

        def bias(name, heads=1):
            biases = biases_of(8, plans[name].lengths, heads)
            return plans[name].scatter_bias(biases, rank).to(DEVICE)

        note("cut", attention("plain", dropout_p=0.5))
        note("share", attention("plain", dropout_p=1.5))
        note(
            "all to all",
            attention("all_to_all", bias=bias("plain")[:, :, :1].expand(1, 1, len(given(plans["all_to_all"])[0]), -1)),
        )
        note("dropout on some", attention("aligned", dropout_p=0.25 if last else 0.0))
        note("dropout on others", attention("aligned", dropout_p=0.0 if last else 0.25))
        note("columns", attention("plain", bias=bias("plain")[..., : 50 if last else None]))
        note("heads", attention("plain", bias=bias("plain", plan_heads[0] if last else 1)))
        note("presence", attention("plain", bias=bias("plain") if last else None))
        note("stages", attention("two stages", bias=bias("two stages").requires_grad_()))
        note("gradients", attention("plain", bias=bias("plain", plan_heads[0]).requires_grad_(last)))

        q, k, v = (torch.randn(2, 3, heads, dim).to(DEVICE) for heads, dim in ((4, DIM), (2, DIM), (2, DIM_V)))
        note("queries", lambda: ranks.decode(q[:1] if last else q, k[:1] if last else k, v[:1] if last else v))
        note("softcap", lambda: ranks.decode(q, k, v, softcap=float(last)))
        note("cache", lambda: ranks.decode(q, k[..., :8] if last else k, v))
        note("lengths", lambda: ranks.decode(q, k, v, seqused_k=[1] if last else [1, 2]))

        attention("plain", bias=bias("plain"))()
        attention("aligned", dropout_p=0.25)()
        ranks.decode(q, k, v)
    torch.save(said, f"{folder}/results{rank}")
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


def die(rank, folder, dropped):
    """Rank 1 is killed between forward and backward, or between two forwards with dropout."""
    join(rank, folder)
    lengths = [112, 16]
    plan = plan_of("gather", lengths, contiguous=True)  # cut at row 64
    given = [plan.scatter(x, rank).requires_grad_() for x in inputs(6, lengths)[:3]]

    def attention():
        return ranks.attention(plan, *given, dropout_p=dropped)

    with Ranks(timeout=SECONDS / 3) as ranks:
        out = attention()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = []
        for use in (attention if dropped else lambda: out.sum().backward(), ranks.status, attention):
            try:
                use()
                seen.append("no error")
            except flashattn.Error as error:
                seen.append(error.name)
    torch.save(seen, f"{folder}/results{rank}")


@unittest.skipUnless(GLOO, "this PyTorch has no gloo")
@unittest.skipIf(GROUP == "nccl" and torch.cuda.device_count() < RANKS, "fewer GPUs than ranks")
class RanksTest(unittest.TestCase):
    #: What `run_options` leaves with a number of ranks, and the seed.
    of_options = {}

    def run_ranks(self, body, *arguments, num_ranks=RANKS, expected=None):
        """What each process leaves behind; None for one that left nothing."""
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            processes = [context.Process(target=body, args=(rank, folder, *arguments)) for rank in range(num_ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join(SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()
            self.assertEqual(tuple(process.exitcode for process in processes), expected or (0,) * num_ranks)
            names = [f"{folder}/results{rank}" for rank in range(num_ranks)]
            return [torch.load(name) if os.path.exists(name) else None for name in names]

    def options_results(self, part):
        """(number of ranks, seed, results of each rank) of a part of `run_options`."""
        for num_ranks in (2, 3):
            if GROUP == "nccl" and torch.cuda.device_count() < num_ranks:
                continue
            if num_ranks not in self.of_options:
                seed = int.from_bytes(os.urandom(3), "little")
                self.of_options[num_ranks] = seed, self.run_ranks(run_options, num_ranks, seed, num_ranks=num_ranks)
            seed, results = self.of_options[num_ranks]
            yield num_ranks, seed, [result[part] for result in results]

    def assert_near(self, ours, theirs, tolerance=3e-5):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)

    def test_dropout_like_one_device(self):
        for num_ranks, seed, results in self.options_results("dropout"):
            for number, case in enumerate(DROPOUT * 2):
                again, case_number = divmod(number, len(DROPOUT))
                with self.subTest(ranks=num_ranks, seed=seed, case=case, again=again):
                    self.compare_dropout(
                        case, num_ranks, seed, again, [result[0][2 * case_number + again] for result in results]
                    )
            for rank, (of_cases, checkpointed, drawn) in enumerate(results):
                for ours, theirs in zip(checkpointed, of_cases[-1]):
                    self.assertTrue(torch.equal(ours, theirs))
                torch.manual_seed(seed + 1 + rank)
                torch.randint(2**63 - 1, (1,), device=DEVICE)
                self.assertTrue(torch.equal(drawn, torch.rand(3, device=DEVICE).cpu()))

    def compare_dropout(self, case, num_ranks, seed, again, parts):
        """One device, which computes all documents in one packed call."""
        _, _, of_plan, source, _ = case
        plan, (q, k, v, _, dout, dlse), biases = dropout_problem(case, num_ranks, seed)
        self.assertLess(sum(piece.whole for piece in plan.pieces), len(plan.pieces))
        offsets = torch.tensor([0, *plan.lengths]).cumsum(0).int()
        options = {"causal": of_plan.get("causal", False), "window": of_plan.get("window", (None, None)), "dropout_p": DROPPED}
        options.update(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        if source == "drawn":
            torch.manual_seed(seed + again)
            options["dropout_seed"] = int(torch.randint(2**63 - 1, (1,), device=DEVICE))
        else:
            options.update(dropout_seed=dropout_seed(source, seed, again), dropout_offset=OFFSET)
        if biases is not None:
            longest = max(plan.lengths)
            options["bias"] = torch.zeros(len(biases), 1, longest, longest)
            for document, bias in enumerate(biases):
                options["bias"][document, :, : bias.shape[2], : bias.shape[3]] = bias
            options.update(max_seqlen_q=longest, max_seqlen_k=longest)
        out, lse = flashattn.forward(q, k, v, **options)
        gradients = flashattn.backward(dout, q, k, v, out, lse, dlse=dlse, **options)
        kept, _ = flashattn.forward(q, k, v, **{**options, "dropout_p": 0.0})
        self.assertGreater(float((out - kept).abs().max()), 0.1)
        for n, theirs in enumerate((out, lse, gradients.dq, gradients.dk, gradients.dv)):
            self.assert_near(plan.gather([part[n] for part in parts], 1 if n == 1 else 0), theirs, 1e-4)
        if biases is not None:
            for rank, part in enumerate(parts):
                of_documents = [gradients.dbias[document : document + 1, :, :n, :n] for document, n in enumerate(plan.lengths)]
                self.assert_near(part[5], plan.scatter_bias(of_documents, rank), 1e-4)

    def test_bias_like_one_rank(self):
        for num_ranks, seed, results in self.options_results("bias"):
            for number, (way, lengths, of_plan, heads, of_call) in enumerate(BIAS):
                with self.subTest(
                    ranks=num_ranks, seed=seed, way=way, lengths=lengths, plan=of_plan, heads=heads, call=of_call
                ):
                    plan = plan_of(way, lengths, num_ranks, **of_plan)
                    self.assertLess(sum(piece.whole for piece in plan.pieces), len(plan.pieces))
                    biases = biases_of(seed, lengths, heads)
                    causal, window = of_plan.get("causal", False), of_plan.get("window", (None, None))
                    with_sink = "sink" in of_call
                    softcap = of_call.get("softcap", 0)
                    expected = reference(inputs(seed, lengths), causal, window, softcap, with_sink, lengths, biases)
                    parts = [result[number] for result in results]
                    for n, theirs in enumerate((*expected[:5], expected[0], expected[0])):
                        ours = [part[n if n < 5 else n - 7] for part in parts]
                        self.assert_near(plan.gather(ours, 1 if n == 1 else 0), theirs)
                    if with_sink:
                        for part in parts:
                            self.assert_near(part[5], expected[5])
                    of_biases = expected[5 + with_sink :]
                    for document, theirs in enumerate(of_biases):  # each row is some rank's, and zero elsewhere
                        self.assert_near(sum(part[5 + with_sink + document] for part in parts), theirs)
                    for rank, part in enumerate(parts):
                        self.assert_near(part[-3], plan.scatter_bias(of_biases, rank))  # with zeros behind shorter documents

    def test_decode_like_one_rank(self):
        for num_ranks, seed, results in self.options_results("decode"):
            for number, case in enumerate(DECODE):
                with self.subTest(ranks=num_ranks, seed=seed, case=case):
                    expected = decode_reference(case, num_ranks, seed)
                    tolerance = 3e-5 if case[1] == torch.float32 else 2e-2
                    for again in range(2):
                        parts = [result[2 * number + again] for result in results]
                        for out, lse, info in parts:
                            self.assertEqual(out.dtype, case[1])
                            self.assertTrue(torch.equal(out, parts[0][0]) and torch.equal(lse, parts[0][1]))
                            self.assert_near(out, expected[0], tolerance)
                            self.assert_near(lse, expected[1], 2 * tolerance)
                            received = (num_ranks - 1) * lse.numel() * (DIM_V * out.itemsize + 4)
                            expected_info = {"received_bytes": received, "sent_bytes": received, "num_stages": 0}
                            self.assertEqual(expected_info, {name: info[name] for name in expected_info})
                            self.assertGreaterEqual(info["workspace_bytes"], num_ranks * lse.numel() * DIM_V * out.itemsize)
                            self.assertIn("merge", info["reason"])

    def test_queries_like_the_plan(self):
        for _, _, results in self.options_results("query"):
            for asked, received, num_stages in results:
                self.assertEqual(tuple(info["received_bytes"] for info in asked), received)
                self.assertEqual([info["num_stages"] for info in asked], [num_stages] * 2)
                self.assertGreater(asked[0]["received_bytes"], 0)
            for n in range(2):
                sent = sum(asked[n]["sent_bytes"] for asked, *_ in results)
                self.assertEqual(sent, sum(asked[n]["received_bytes"] for asked, *_ in results))

    def test_what_every_rank_refuses(self):
        num_ranks = 2 if GROUP == "nccl" else 3
        results = self.run_ranks(refuse, num_ranks, num_ranks=num_ranks)
        last, heads = num_ranks - 1, 2 * num_ranks
        of_all = {
            "cut": "FA_ERROR_UNSUPPORTED: dropout_p is 0.5 and document 0 is cut at row [0-9]+; with dropout documents are cut at multiples of 16",
            "share": "dropout_p is 1.5",
            "all to all": "bias is given, document [0-9] is cut over ranks, and the way is FA_DIST_ALL_TO_ALL",
            "dropout on some": f"dropout_p is 0 on rank 0 and 0.25 on rank {last}; all ranks must agree",
            "dropout on others": f"dropout_p is 0.25 on rank 0 and 0 on rank {last}; all ranks must agree",
            "heads": rf"heads of bias \(0 = absent\) is 1 on rank 0 and {heads} on rank {last}",
            "presence": rf"heads of bias \(0 = absent\) is 0 on rank 0 and 1 on rank {last}",
            "stages": r"dbias is summed over heads, because bias.shape\[1\] is 1, but the layout has 2 stages of heads",
            "gradients": f"presence of dbias is 0 on rank 0 and 1 on rank {last}",
            "queries": rf"q.shape\[0\] is 2 on rank 0 and 1 on rank {last}",
            "softcap": f"softcap is 0 on rank 0 and 1 on rank {last}",
        }
        of_last = {
            "columns": r"FA_ERROR_SHAPE: bias.shape\[3\] is 50; it must be at least 90 \(keys of document 0\)",
            "cache": r"FA_ERROR_SHAPE: k.shape\[3\] is 8",
            "lengths": r"FA_ERROR_SHAPE: seqused_k.shape\[0\] is 1",
        }
        for rank, said in enumerate(results):
            self.assertEqual(set(said), {*of_all, *of_last})
            for name, sentence in said.items():
                with self.subTest(name, rank=rank):
                    expected = of_all.get(name, f"rank {last} refuses its own arguments with FA_ERROR_SHAPE")
                    self.assertRegex(sentence, of_last[name] if name in of_last and rank == last else expected)

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
        for dropped in (0.0, 0.5):
            with self.subTest(dropped=dropped):
                results = self.run_ranks(die, dropped, expected=(0, -signal.SIGKILL))
                self.assertEqual(results[0], ["FA_ERROR_TRANSPORT"] * 3)


@unittest.skipUnless(GLOO, "this PyTorch has no gloo")
class OneRankTest(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)

    def test_what_a_call_would_need(self):
        ranks = Ranks()
        plan = plan_of(num_ranks=1, causal=True)
        q, k, v = (x.requires_grad_() for x in inputs(1)[:3])
        biases = biases_of(1, LENGTHS, 1)
        forward = ranks.query(plan, q, k, v, softcap=2.0, dropout_p=0.5, bias=plan.scatter_bias(biases, 0))
        self.assertEqual((forward.received_bytes, forward.sent_bytes, forward.num_stages), (0, 0, 0))
        self.assertEqual(forward.reason, plan.reason)
        self.assertGreater(forward.num_launches, 0)
        backward = ranks.query(plan, q, k, v, return_lse=True, backward=True)
        self.assertGreater(backward.workspace_bytes, forward.workspace_bytes)
        with self.assertRaisesRegex(ValueError, "no input requires a gradient"):
            ranks.query(plan, q.detach(), k.detach(), v.detach(), backward=True)
        with self.assertRaisesRegex(flashattn.Error, "softcap is -1"):
            ranks.query(plan, q, k, v, softcap=-1.0)
        with self.assertRaisesRegex(flashattn.Error, "seqused_k is given; the layout says"):
            ranks.query(plan, q, k, v, seqused_k=torch.ones(3, dtype=torch.int32))
        with self.assertRaisesRegex(TypeError, "there is no option 'softcup'"):
            ranks.query(plan, q, k, v, softcup=1.0)
        q, k, v = (torch.zeros(1, 2, 2, DIM) for _ in range(3))
        self.assertEqual(ranks.query_decode(q, k, v).received_bytes, 0)
        for name, tensor in (("alibi_slopes", torch.ones(2)), ("cu_seqlens_q", torch.tensor([0, 2], dtype=torch.int32))):
            with self.assertRaisesRegex(flashattn.Error, f"{name} is given; fa_dist_decode"):
                ranks.query_decode(q, k, v, **{name: tensor})

    def test_options_that_are_refused(self):
        ranks, plan = Ranks(), plan_of(num_ranks=1, causal=True)
        given = inputs(1)[:3]
        with self.assertRaisesRegex(TypeError, "dropout_seed is a str; it must be a number, a tensor of one int64, or None"):
            ranks.attention(plan, *given, dropout_p=0.5, dropout_seed="7")
        with self.assertRaisesRegex(TypeError, "dropout_seed must be a number or one int64, not"):
            ranks.attention(plan, *given, dropout_p=0.5, dropout_seed=torch.tensor([1, 2]))
        with self.assertRaisesRegex(OverflowError, "dropout_offset is 18446744073709551616"):
            ranks.attention(plan, *given, dropout_p=0.5, dropout_offset=2**64)
        for share in (-0.5, 1.5, float("nan")):
            with self.assertRaisesRegex(flashattn.Error, f"dropout_p is {share}"):
                ranks.attention(plan, *given, dropout_p=share)
        with self.assertRaisesRegex(flashattn.Error, r"bias.shape\[2\] is 136; it must be 137 \(rows of this rank"):
            ranks.attention(plan, *given, bias=torch.zeros(1, 1, sum(LENGTHS) - 1, max(LENGTHS)))
        with self.assertRaisesRegex(NotImplementedError, "alibi_slopes requires a gradient, but flashattn has none"):
            ranks.attention(plan, *given, alibi_slopes=torch.ones(HEADS_Q, requires_grad=True))
        q, k, v = (torch.zeros(1, 2, 2, DIM) for _ in range(3))
        for n, name in enumerate("qkv"):
            given = [x.clone().requires_grad_(m == n) for m, x in enumerate((q, k, v))]
            with self.assertRaisesRegex(
                NotImplementedError, f"{name} requires a gradient, but decode has none; give {name}.detach"
            ):
                ranks.decode(*given)
            with torch.no_grad():
                self.assertFalse(ranks.decode(*given).requires_grad)
        with self.assertRaisesRegex(NotImplementedError, "sink requires a gradient"):
            ranks.decode(q, k, v, sink=torch.zeros(2, requires_grad=True))
        with self.assertRaisesRegex(TypeError, "q has 3 dimensions; decode needs"):
            ranks.decode(q[0], k, v)
        with self.assertRaisesRegex(TypeError, "q has 4 dimensions; it needs"):
            ranks.attention(plan, q, k, v)
        with self.assertRaisesRegex(TypeError, "seqused_k has dtype torch.float32; it must hold integers"):
            ranks.decode(q, k, v, seqused_k=torch.ones(1))

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

    def test_rows_of_a_bias(self):
        plan = plan_of(causal=True)
        biases = [torch.randn(1, 2, rows, rows) for rows in LENGTHS]
        for rank in range(RANKS):
            rows, ours = plan.rows(rank), plan.scatter_bias(biases, rank)
            self.assertEqual(ours.shape[:3], (1, 2, len(rows)))
            for position, row in enumerate(rows.tolist()):
                document, row = next((n, row - first) for n, first, end in self.documents() if first <= row < end)
                length = LENGTHS[document]
                self.assertTrue(torch.equal(ours[:, :, position, :length], biases[document][:, :, row]))
                self.assertFalse(ours[:, :, position, length:].any())
        with self.assertRaisesRegex(ValueError, "biases has 2 tensors; the plan has 3 documents"):
            plan.scatter_bias(biases[:2], 0)
        with self.assertRaisesRegex(
            ValueError, r"biases\[1\] has shape \(1, 1, 7, 7\); it must be \(1, heads, 7, 7\), with as many heads"
        ):
            plan.scatter_bias([biases[0], biases[1][:, :1], biases[2]], 0)
        with self.assertRaisesRegex(ValueError, "rank is 2"):
            plan.scatter_bias(biases, RANKS)
        alone = plan_of(lengths=[3], num_ranks=4)  # the last rank has no rows
        self.assertEqual(alone.scatter_bias([torch.zeros(1, 2, 3, 3)], 3).shape[:3], (1, 2, 0))

    @staticmethod
    def documents():
        """Number, first row and end of each."""
        first = 0
        for n, rows in enumerate(LENGTHS):
            yield n, first, first + rows
            first += rows

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
