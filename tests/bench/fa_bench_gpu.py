#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark: libflashattn beside FlashAttention-4, cuDNN and FlashAttention-2, interleaved in one process.

    FLASHATTN_LIBRARY=build/release/libflashattn.so tests/bench/fa_bench_gpu.py --json run.json --svg run.svg

Data is random-normal bf16 (section fp32: fp32), times are medians, FLOPs count visible pairs (docs/performance.md). `x FA2`, `x cuDNN` say how many times
faster ours is, and `x FA4` where the package flash-attn-4 is installed, `x FlashMLA` where FLASHMLA_LIBRARY names its extension module; `x FA3` goes through the ratio of FA3 to cuDNN in another run (docs/data/peers.json, tests/bench/gpu/published.json); `x plain` compares rows
with softcap, ALiBi and so on with our own kernel without them, and deterministic rows with the other kind. Rows of the section sm80
run the kernels for that chip, plain ones too, whatever the device is. In the section fp8, ours and the published FA3 take e4m3 operands,
all others, `x plain` too, bf16. In the section decode, `x read` compares with a kernel that only
reads the keys and values: at most 1, and cuDNN's paged figures are published ones.
"""
import argparse
import dataclasses
import datetime
import json
import math
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu import cases, plot, report  # noqa: E402  (nothing of these needs torch)

WHOLE = ("host", "memory")  # sections that are no rows


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join((*cases.SECTIONS, *WHOLE)), help="comma-separated; default: %(default)s")
    parser.add_argument("--filter", action="append", default=[], metavar="TEXT",
                        help="only rows whose 'section: name ' contains TEXT; several must all match")
    parser.add_argument("--quick", action="store_true", help="a coarser grid within a minute")
    parser.add_argument("--seconds", type=float, help="time for all rows together (default 270, with --quick 50)")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw forward and backward")
    parser.add_argument("--before", type=Path, metavar="LIBRARY", help="another build of the library, in the same process and rounds: `x before`")
    parser.add_argument("--alone", action="store_true", help="without FlashAttention-2, cuDNN and `plain`: with --before, two libraries alone")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="compare with the JSON of an earlier run")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE",
                        help="measure nothing: print, draw and compare this JSON; several: the rows of runs on one kind of machine together")
    parser.add_argument("--host-program", type=Path, metavar="FILE", help="fa_bench_host of the build, for the host time of C calls")
    args = parser.parse_args(argv)
    args.sections = [name for name in args.sections.split(",") if name]
    unknown = [name for name in args.sections if name not in (*cases.SECTIONS, *WHOLE)]
    if unknown:
        parser.error(f"unknown section {', '.join(unknown)}")
    args.seconds = args.seconds or (50 if args.quick else 270)
    return args


def inputs(case):
    """q, k, v as the case shapes them."""
    import torch

    rows_q, rows_k = ((sum(case.lengths),),) * 2 if case.lengths else ((case.batch, case.seqlen_q), (case.batch, case.seqlen_k))
    if case.page:
        rows_k = (case.batch * case.pages, case.page)
    sizes = ((*rows_q, case.heads_q, case.head_dim), (*rows_k, case.heads_k, case.head_dim), (*rows_k, case.heads_k, case.d_v))
    dtype = torch.float32 if case.section == cases.FP32 else torch.bfloat16
    q, k, v = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    k = quantised(case, k)
    return [q, k, k[..., : case.d_v] if case.latent else quantised(case, v)]


def quantised(case, t):
    """The tensor in the format of the case's cache: e4m3 as it is, int8 in units of 1/32."""
    import torch

    if not case.cache:
        return t
    return (t * 32).clamp(-127, 127).to(torch.int8) if case.cache.startswith("int8") else t.to(torch.float8_e4m3fn)


def contenders_of(case, context, before=None, alone=False):
    """{name: one contender for each set of inputs}, ours first. Those that cannot run the case are left out. `before`: the context of another build."""
    import torch

    from gpu import library, opponents

    cu = None
    if case.lengths:
        cu = torch.tensor([sum(case.lengths[:n]) for n in range(len(case.lengths) + 1)], dtype=torch.int32, device="cuda")

    def ours(q, k, v, option, deterministic, context=context):
        pages = None
        if case.page:
            pages = torch.randperm(case.batch * case.pages, device="cuda").view(case.batch, -1).to(torch.int32)
        return library.Attention(context, q, k, v, case.causal, deterministic, cu, case.seqlen_q, option, pages=pages,
                                 listed=case.listed)

    # Decoding goes round among enough inputs that the L2 cache holds none of them.
    sets = [inputs(case) for _ in range(min(8, -(-200_000_000 // case.key_bytes)) if case.section in ("decode", "listed", cases.SAME_BITS) and case.seqlen_q < 16 else 1)]
    contenders = {"ours": [ours(*tensors, case.option, case.deterministic) for tensors in sets]}
    if before is not None:
        contenders["before"] = [ours(*tensors, case.option, case.deterministic, before) for tensors in sets]
    # Others have no forward-mode derivative.
    for tensors, mine in () if alone or case.direction == "jvp" else zip(sets, contenders["ours"]):
        for opponent in opponents.opponents(case, *tensors, cu, mine):
            contenders.setdefault(opponent.name, []).append(opponent)
    if (case.option or case.deterministic) and (not alone or case.section == cases.SAME_BITS):
        without = " + ".join(option for option in case.option.split(" + ") if option != cases.SAME_BITS) if case.section == cases.SAME_BITS else ""
        plain = [inputs(dataclasses.replace(case, option="")) for _ in sets] if case.cache and not without else sets
        deterministic = case.section == cases.SAME_BITS and case.direction == "backward"
        contenders["plain"] = [ours(*tensors, without, deterministic) for tensors in plain]
    if cases.SCORES.get(case.option):
        contenders["same"] = [ours(*tensors, cases.SCORES[case.option], False) for tensors in sets]
    same = {"documents": "", "left": "starts", "bits": "", "bytes": ""}.get(case.option)
    if same is not None and not case.page:
        even = [n * case.seqlen_k // cases.DOCUMENTS for n in range(cases.DOCUMENTS + 1)]
        cu = torch.tensor(even, dtype=torch.int32, device="cuda") if case.option == "documents" else None
        q, k, v = (t[0] if cu is not None else t for t in sets[0])
        causal, longest = case.option in ("bits", "bytes"), case.seqlen_k // cases.DOCUMENTS
        contenders["same"] = [library.Attention(context, q, k, v, causal, False, cu, longest, same)]
    for contender in [one for several in contenders.values() for one in several]:
        contender.forward()
    if case.direction == "jvp":
        for contender in [one for several in contenders.values() for one in several]:
            contender.prepare_jvp()
    if case.direction == "backward":
        dout = torch.randn_like(contenders["ours"][0].out)
        for name, (contender, *_) in list(contenders.items()):
            try:
                contender.prepare_backward(dout.view(contender.out.shape) if name == "same" else dout)
                contender.backward()
            except Exception as failure:  # of FlashAttention-4 there are several kinds
                if name == "ours":
                    raise
                print(f"{case.name}: {name} has no backward: {failure}", file=sys.stderr)
                del contenders[name]
    return contenders


def largest_difference(case, contenders):
    """Relative difference between our results and those of the first opponent; None without one that does the same."""
    if case.option == "dropout" or (case.latent and case.cache and not case.listed):  # of other elements; of 8-bit queries
        return None
    reference = next((kept[0] for name, kept in contenders.items() if name in ("fa2", "cudnn", "efficient", "fa4", "flex", "flashmla")), None)
    if reference is None:
        return None
    ours = contenders["ours"][0]
    pairs = [(ours.out, reference.forward())]
    if case.direction == "backward":
        pairs += zip(ours.grads, reference.backward())
    errors = [((mine.float() - theirs.float()).norm() / theirs.float().norm()).item() for mine, theirs in pairs]
    return max(errors, key=lambda error: (math.isnan(error), error))


def measure_case(case, context, budget_s, before=None, alone=False):
    """One row. This and what it calls import torch late, so that the rest of this program works without it."""
    from gpu import timing

    contenders = contenders_of(case, context, before, alone)
    row = dict(dataclasses.asdict(case), name=case.name, flops=case.flops, kernel=contenders["ours"][0].kernel)
    error = largest_difference(case, contenders)
    if error is not None:
        row["error"] = error
    calls = {name: [getattr(contender, case.direction) for contender in kept] for name, kept in contenders.items()}
    per_call = 1
    if case.graph:
        per_call = timing.GRAPH_CALLS
        calls = {name: [timing.graph_of([kept[i % len(kept)] for i in range(per_call)])] for name, kept in calls.items()}
    row["ms"] = timing.side_by_side({name: kept[0] for name, kept in calls.items()}, budget_s, per_call, lead="fa4" in calls)
    if case.section == "decode":
        row["gbytes"] = case.key_bytes / row["ms"]["ours"] / 1e6
    return report.add_ratios(row)


def measure_host(context, program):
    """Microseconds of host time of one call on a tiny problem."""
    import torch

    from gpu import library, opponents, timing

    tiny = cases.Case("host", "forward", 64, False, 64, 64, 1, 1, 1)
    q, k, v = (torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mine = library.Attention(context, q, k, v)
    results = {"ours through ctypes": timing.host_us(mine.forward)}
    for opponent in opponents.opponents(tiny, q, k, v, None, mine):
        results[f"{opponent.name} through PyTorch"] = timing.host_us(opponent.forward)
    if program:
        results.update(json.loads(subprocess.run([program.resolve()], check=True, capture_output=True, text=True).stdout))
    return results


def measure(args, rows_wanted):
    import torch

    from gpu import library, opponents

    archs = {0} | {case.arch for case in rows_wanted}
    contexts = {arch: library.Context(arch) for arch in archs}
    before = {}
    if args.before:
        other = library.load(args.before)
        before = {arch: library.Context(arch, other) for arch in archs}
    data = {
        "library": library.abi.lib.fa_version_string().decode(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "fa4": opponents.fa4_version(),
        "measured": datetime.date.today().isoformat(),
        "rows": [],
        "host_us": {},
    }
    print(f"libflashattn {data['library']}, {data['device']}, PyTorch {data['torch']}, cuDNN {data['cudnn']}", flush=True)
    deadline = time.monotonic() + args.seconds
    if "host" in args.sections:
        data["host_us"] = measure_host(contexts[0], args.host_program)
    if "memory" in args.sections:
        from gpu import memory

        data["memory"] = memory.measure(contexts[0])
        print(memory.text(data["memory"]), flush=True)
    section, spare_s = None, 0.15  # of a row: inputs and warm-up
    for n, case in enumerate(rows_wanted):
        if case.section != section:
            section = case.section
            print(report.heading(section))
        share = (deadline - time.monotonic()) / (len(rows_wanted) - n) - spare_s
        try:
            data["rows"].append(measure_case(case, contexts[case.arch], max(0.02, min(share, 1.0)), before.get(case.arch), args.alone))
            print(report.line(data["rows"][-1]), flush=True)
        except RuntimeError as failure:  # one row's refusal does not end the run
            print(f"{case.name}: {failure}", flush=True)
    return data


def together(runs):
    """Runs of several sections as one, rows in the order of the sections."""
    differing = [key for key in ("library", "device", "torch", "cudnn", "fa4") if len({run.get(key) for run in runs}) > 1]
    if differing:
        raise SystemExit(f"these runs differ in {', '.join(differing)}: they are not one")
    data = {}
    for run in runs:
        data.update({key: value for key, value in run.items() if value or key not in data})
    rows = [report.add_ratios(row) for run in runs for row in run["rows"]]
    return dict(data, rows=sorted(rows, key=lambda row: cases.SECTIONS.index(row["section"])))


def main(argv=None):
    args = parse(argv)
    rows_wanted = cases.all_cases([name for name in cases.SECTIONS if name in args.sections], args.quick, args.filter)
    if args.list:
        print("\n".join(f"{case.section}: {case.name}" for case in rows_wanted))
        return 0
    if args.replay:
        data = together([json.loads(path.read_text()) for path in args.replay])
        for n, row in enumerate(data["rows"]):
            if n == 0 or row["section"] != data["rows"][n - 1]["section"]:
                print(report.heading(row["section"]))
            print(report.line(row))
    else:
        data = measure(args, rows_wanted)
    print(report.summary(data["rows"], data["host_us"]))
    if args.baseline:
        print(report.compare(data["rows"], json.loads(args.baseline.read_text())["rows"]))
    if args.json:
        args.json.write_text(report.to_json(data))
    if args.svg:
        args.svg.write_text(plot.svg(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
