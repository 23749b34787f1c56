# SPDX-License-Identifier: Apache-2.0
"""The benchmark tables of the README and of docs/measured.md, from the JSON in docs/data: runs of fa_bench_cpu and fa_bench_gpu.py, and
the direct comparison with FA3. docs/pictures.py writes them."""
import math
import re
from collections import defaultdict, namedtuple

# The comments that stand around a table.
Markers = namedtuple("Markers", "begin end")
CPU = Markers("<!-- benchmark table: written by docs/pictures.py from docs/data/cpu.json; do not edit by hand -->",
              "<!-- end of benchmark table -->")
GPU = Markers("<!-- GPU benchmark table: written by docs/pictures.py from docs/data/gpu.json; do not edit by hand -->",
              "<!-- end of GPU benchmark table -->")
PEERS = Markers("<!-- peers table: written by docs/pictures.py from docs/data/peers.json; do not edit by hand -->",
                "<!-- end of peers table -->")
HEADLINE = Markers("<!-- headline: written by docs/pictures.py from docs/data/peers.json; do not edit by hand -->", "<!-- end of headline -->")
SPEED = Markers("<!-- speed table: written by docs/pictures.py from docs/data; do not edit by hand -->", "<!-- end of speed table -->")


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
            f"({data['probe_isa']}) or, for decode, of the read bandwidth, probed in the same run.")
    return note, lines


def gpu_cell(row):
    """TFLOP/s, and how many times faster that is than FA2 and cuDNN in the same run."""
    if row is None:
        return ""
    ms = row["ms"]
    ratios = ", ".join(f"{ms[name] / ms['ours']:.2f}" if name in ms else "-" for name in ("fa2", "cudnn"))
    return f"{row['flops'] / ms['ours'] / 1e9:.0f} ({ratios})"


def fa2_ratios(data):
    """{direction: how many times faster ours is than FA2 in each row of the grid}."""
    ratios = defaultdict(list)
    for row in data["rows"]:
        if row["section"] in ("forward", "backward") and "fa2" in row["ms"]:
            ratios[row["direction"]].append(row["ms"]["fa2"] / row["ms"]["ours"])
    return ratios


def gpu_table(data):
    grid = [row for row in data["rows"] if row["section"] in ("forward", "backward")]
    seqlens = sorted({row["seqlen_q"] for row in grid})
    cases = defaultdict(dict)
    for row in grid:
        mask = "causal" if row["causal"] else "full"
        heads = "" if row["heads_q"] == row["heads_k"] else f", {row['heads_q']}/{row['heads_k']} heads"
        cases[f"{row['direction']}, head_dim {row['head_dim']}, {mask}{heads}"][row["seqlen_q"]] = row
    lines = ["| TFLOP/s (times FA2, times cuDNN) | " + " | ".join(f"{n} rows" for n in seqlens) + " |",
             "|---" * (1 + len(seqlens)) + "|"]
    lines += [f"| {name} | " + " | ".join(gpu_cell(rows.get(n)) for n in seqlens) + " |" for name, rows in cases.items()]
    ratios = [f"{direction} {mean(values):.2f} (smallest {min(values):.2f})" for direction, values in fa2_ratios(data).items()]
    note = (f"libflashattn {data['library']} on one {data['device']}, bf16, batch x rows = 16384, heads x head_dim = 2048, beside "
            f"PyTorch {data['torch']}'s FlashAttention-2 and cuDNN {data['cudnn']} in the same process. Geometric mean of the ratio to "
            f"FA2: {', '.join(ratios)}.")
    return note, lines


def mean(values):
    """The geometric mean, for ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def over(row, name):
    """How many times faster ours is, in the direct comparison."""
    return row["ours"] / row[name]


def by_shape(peers):
    """{(direction, head_dim, mask): {seqlen: row}} of the direct comparison; its rows are named as the benchmark's are."""
    shapes = defaultdict(dict)
    for name, row in peers["rows"].items():
        direction, head_dim, mask, seqlen = re.fullmatch(r"\w+: (\w+) D(\d+) (\w+) S(\d+)", name).groups()
        shapes[direction, int(head_dim), mask][int(seqlen)] = row
    return shapes


def means(peers, direction, name):
    return mean([over(row, name) for key, row in peers["rows"].items() if key.startswith(direction)])


def peers_table(peers):
    """The direct comparison with FA3 and cuDNN, row by row."""
    shapes = by_shape(peers)
    seqlens = sorted({n for rows in shapes.values() for n in rows})
    lines = ["| TFLOP/s (times FA3, times cuDNN) | " + " | ".join(f"{n} rows" for n in seqlens) + " |", "|---" * (1 + len(seqlens)) + "|"]
    for (direction, head_dim, mask), rows in shapes.items():
        cells = [f"{rows[n]['ours']:.0f} ({over(rows[n], 'fa3'):.2f}, {over(rows[n], 'cudnn'):.2f})" for n in seqlens]
        lines.append(f"| {direction}, head_dim {head_dim}, {mask} | {' | '.join(cells)} |")
    ratios = [f"{direction} {means(peers, direction, 'fa3'):.2f} times {peers['contenders']['fa3'].split(',')[0]} and "
              f"{means(peers, direction, 'cudnn'):.2f} times cuDNN" for direction in ("forward", "backward")]
    return f"{peers['measured']}. {peers['method']} Geometric means: {'; '.join(ratios)}.", lines


def headline(peers):
    """The README's one number."""
    rows = sum(key.startswith("forward") for key in peers["rows"])
    return (f"**On an {peers['device'].replace('NVIDIA ', '')} the forward pass is {means(peers, 'forward', 'fa3'):.2f} times as fast as FlashAttention-3 and "
            f"{means(peers, 'forward', 'cudnn'):.2f} times as fast as cuDNN** (geometric means over {rows} shapes in bf16, one process). "
            f"The backward pass is {means(peers, 'backward', 'fa3'):.2f} and {means(peers, 'backward', 'cudnn'):.2f} times as fast.")


def speed_table(peers, gpu, cpu):
    """What a stranger reads once: the README's table."""
    shapes = by_shape(peers)
    lines = ["| bf16 | TFLOP/s at 16k rows: full, causal | times FlashAttention-3 | times cuDNN |", "|---|---|---|---|"]
    for direction, head_dim in dict.fromkeys(key[:2] for key in shapes):
        both = [shapes[direction, head_dim, mask] for mask in ("full", "causal")]
        cells = []
        for name in ("fa3", "cudnn"):
            ratios = [over(row, name) for rows in both for row in rows.values()]
            cells.append(f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {direction}, head_dim {head_dim} | {both[0][16384]['ours']:.0f}, {both[1][16384]['ours']:.0f} | {' | '.join(cells)} |")
    fa2 = [f"{mean(ratios):.1f} ({direction})" for direction, ratios in fa2_ratios(gpu).items()]
    rows = [row for row in cpu["rows"] if row["pass"] in ("forward", "backward")]
    fractions = [100 * row["fraction"] for row in rows]
    note = (f"One {peers['device']}, libflashattn, FlashAttention-3 and cuDNN in one process. Ratios above 1 mean that libflashattn is faster; each is a geometric mean "
            "over sequences of 512 to 16384 rows, full and causal, with the smallest and the largest in brackets. "
            f"In another run libflashattn was {' and '.join(fa2)} times as fast as FlashAttention-2 of PyTorch {gpu['torch']}. "
            f"On a CPU ({cpu['machine'].split(';')[0]}) its forward and backward run at {min(fractions):.0f} to {max(fractions):.0f} % of the "
            f"fp32 multiply-add peak ({cpu['probe_isa']}). [docs/measured.md](docs/measured.md) has every row, "
            "[docs/performance.md](docs/performance.md) the method, and where others are faster.")
    return note, lines


def between(markers, note, lines, text):
    before, rest = text.split(markers.begin)
    after = rest.split(markers.end)[1]
    body = "\n".join([note, "", *lines] if lines else [note])
    return f"{before}{markers.begin}\n{body}\n{markers.end}{after}"


def readme(peers, gpu, cpu, text):
    """The README with the tables of these runs."""
    return between(SPEED, *speed_table(peers, gpu, cpu), between(HEADLINE, headline(peers), [], text))


def measured(peers, gpu, cpu, text):
    """docs/measured.md with the tables of these runs."""
    for markers, table in ((PEERS, peers_table(peers)), (GPU, gpu_table(gpu)), (CPU, cpu_table(cpu))):
        text = between(markers, *table, text)
    return text
