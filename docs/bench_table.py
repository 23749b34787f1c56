# SPDX-License-Identifier: Apache-2.0
"""The benchmark tables of the README and of docs/performance.md, from the JSON of fa_bench_cpu and fa_bench_gpu.py. docs/pictures.py
writes them."""
import math
from collections import defaultdict, namedtuple

# The comments that stand around a table.
Markers = namedtuple("Markers", "begin end")
CPU = Markers("<!-- benchmark table: written by docs/pictures.py from docs/data/cpu.json; do not edit by hand -->",
              "<!-- end of benchmark table -->")
GPU = Markers("<!-- GPU benchmark table: written by docs/pictures.py from docs/data/gpu.json; do not edit by hand -->",
              "<!-- end of GPU benchmark table -->")


def cpu_cell(row):
    """Speed, and beside it the fraction of what the machine could do in the same second."""
    if row is None:
        return ""
    speed = f"{row['gbytes']:.1f} GB/s" if row["pass"] == "decode" else f"{row['gflops']:.0f} GFLOP/s"
    return f"{speed} ({100 * row['fraction']:.0f} %)"


def cpu_table(data):
    cases = defaultdict(dict)
    for row in data["rows"]:
        if row["pass"] != "memory":
            key = (row["pass"], row["dtype"], row["head_dim"], row["seqlen_q"], row["seqlen_k"], row["heads"], row["causal"])
            cases[key][row["threads"]] = row
    threads = sorted({t for case in cases.values() for t in case})
    lines = ["| | dtype | heads x head_dim | queries x keys | mask | "
             + " | ".join(f"{t} thread{'s' if t > 1 else ''}" for t in threads) + " | against unfused |",
             "|---" * (6 + len(threads)) + "|"]
    for (kind, dtype, head_dim, seqlen_q, seqlen_k, heads, causal), rows in cases.items():
        ratios = [row["unfused_ratio"] for row in rows.values() if "unfused_ratio" in row]
        ratio = f"{max(ratios):.1f}x" if ratios else ""
        cells = " | ".join(cpu_cell(rows.get(t)) for t in threads)
        lines.append(f"| {kind} | {dtype} | {heads} x {head_dim} | {seqlen_q} x {seqlen_k} | {'causal' if causal else 'full'} "
                     f"| {cells} | {ratio} |")
    note = (f"libflashattn {data['library']}, batch 1, on {data['machine']}. In brackets the fraction of the fp32 multiply-add peak "
            f"({data['probe_isa']}) or, for decode, of the read bandwidth, probed in the same run; "
            "[docs/performance.md](docs/performance.md) says how.")
    return note, lines


def gpu_cell(row):
    """TFLOP/s, and how many times faster that is than FA2 and cuDNN in the same run."""
    if row is None:
        return ""
    ms = row["ms"]
    ratios = ", ".join(f"{ms[name] / ms['ours']:.2f}" if name in ms else "-" for name in ("fa2", "cudnn"))
    return f"{row['flops'] / ms['ours'] / 1e9:.0f} ({ratios})"


def gpu_table(data):
    grid = [row for row in data["rows"] if row["section"] in ("forward", "backward") and row["heads_q"] == row["heads_k"]]
    seqlens = sorted({row["seqlen_q"] for row in grid})
    cases = defaultdict(dict)
    for row in grid:
        mask = "causal" if row["causal"] else "full"
        cases[f"{row['direction']}, head_dim {row['head_dim']}, {mask}"][row["seqlen_q"]] = row
    lines = ["| TFLOP/s (times FA2, times cuDNN) | " + " | ".join(f"{n} rows" for n in seqlens) + " |",
             "|---" * (1 + len(seqlens)) + "|"]
    lines += [f"| {name} | " + " | ".join(gpu_cell(rows.get(n)) for n in seqlens) + " |" for name, rows in cases.items()]
    means = []
    for direction in ("forward", "backward"):
        ratios = [row["ms"]["fa2"] / row["ms"]["ours"] for row in grid if row["direction"] == direction and "fa2" in row["ms"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            means.append(f"{direction} {mean:.2f} (smallest {min(ratios):.2f})")
    note = (f"libflashattn {data['library']} on one {data['device']}, bf16, batch x rows = 16384, heads x head_dim = 2048, beside "
            f"PyTorch {data['torch']}'s FlashAttention-2 and cuDNN {data['cudnn']} in the same process. Geometric mean of the ratio to "
            f"FA2: {', '.join(means)}. [docs/performance.md](docs/performance.md) says how it is measured.")
    return note, lines


RATIOS = {direction: Markers(f"<!-- {direction} ratios: written by docs/pictures.py from docs/data/gpu.json; do not edit by hand -->",
                             f"<!-- end of {direction} ratios -->") for direction in ("forward", "backward")}
OPPONENTS = {"fa2": "FA2", "cudnn": "cuDNN", "fa3": "FA3"}


def ratio_table(data, direction):
    """How many times faster ours is than each opponent, by sequence length; rows come with their ratios."""
    grid = [row for row in data["rows"] if row["section"] == direction]
    cases = defaultdict(list)
    for row in sorted(grid, key=lambda row: row["seqlen_q"]):
        heads = "" if row["heads_q"] == row["heads_k"] else f", {row['heads_q']}/{row['heads_k']} heads, S = {row['seqlen_q'] // 1024}k"
        cases[heads != "", row["head_dim"], row["causal"], f"D{row['head_dim']} {'causal' if row['causal'] else 'full'}{heads}"].append(row)
    lines = ["| | " + " | ".join(f"x {name}" for name in OPPONENTS.values()) + " |", "|---" * (1 + len(OPPONENTS)) + "|"]
    for (*_, name), rows in sorted(cases.items()):
        cells = [" / ".join(f"{row['ratios'][key]:.2f}" for row in rows if key in row["ratios"]) for key in OPPONENTS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    means = []
    for key, name in OPPONENTS.items():
        ratios = [row["ratios"][key] for row in grid if key in row["ratios"]]
        means.append(f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} of {name} (lowest {min(ratios):.2f}, {len(ratios)} rows)")
    seqlens = sorted({row["seqlen_q"] for row in grid if row["heads_q"] == row["heads_k"]})
    lengths = " / ".join(f"{n // 1024}k" if n >= 1024 else str(n) for n in seqlens)
    return f"S = {lengths}. Geometric means: {', '.join(means)}.", lines


def between(markers, note, lines, text):
    before, rest = text.split(markers.begin)
    after = rest.split(markers.end)[1]
    table = "\n".join(lines)
    return f"{before}{markers.begin}\n{note}\n\n{table}\n{markers.end}{after}"


def replaced(data, text):
    """The README with the table of this run."""
    return between(GPU, *gpu_table(data), text) if "device" in data else between(CPU, *cpu_table(data), text)


def with_ratios(data, text):
    """docs/performance.md with the ratios of this run."""
    for direction, markers in RATIOS.items():
        text = between(markers, *ratio_table(data, direction), text)
    return text
