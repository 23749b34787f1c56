# SPDX-License-Identifier: Apache-2.0
"""The benchmark tables of the README and of docs/measured.md, from the JSON in docs/data: runs of fa_bench_cpu and fa_bench_gpu.py, and
a direct comparison with FA3. docs/pictures.py writes them."""
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
HEADLINE = Markers("<!-- headline: written by docs/pictures.py from docs/data/gpu.json; do not edit by hand -->", "<!-- end of headline -->")
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


# The libraries that stand beside ours in a run of fa_bench_gpu.py.
LIBRARIES = {"fa4": "FlashAttention-4", "cudnn": "cuDNN", "fa2": "FlashAttention-2"}


def grid_of(gpu):
    """The rows of the sections forward and backward, and the names of the libraries that all of them have."""
    rows = [row for row in gpu["rows"] if row["section"] in ("forward", "backward")]
    return rows, [name for name in LIBRARIES if all(name in row["tflops"] for row in rows)]


def gpu_cell(row, names):
    """TFLOP/s, and how many times faster that is than the others in the same run."""
    if row is None:
        return ""
    ratios = ", ".join(f"{over(row['tflops'], name):.2f}" for name in names)
    return f"{row['tflops']['ours']:.0f} ({ratios})"


def gpu_table(data):
    grid, names = grid_of(data)
    seqlens = sorted({row["seqlen_q"] for row in grid})
    cases = defaultdict(dict)
    for row in grid:
        mask = "causal" if row["causal"] else "full"
        heads = "" if row["heads_q"] == row["heads_k"] else f", {row['heads_q']}/{row['heads_k']} heads"
        cases[f"{row['direction']}, head_dim {row['head_dim']}, {mask}{heads}"][row["seqlen_q"]] = row
    times = ", ".join(f"times {LIBRARIES[name]}" for name in names)
    lines = [f"| TFLOP/s ({times}) | " + " | ".join(f"{n} rows" for n in seqlens) + " |",
             "|---" * (1 + len(seqlens)) + "|"]
    lines += [f"| {name} | " + " | ".join(gpu_cell(rows.get(n), names) for n in seqlens) + " |" for name, rows in cases.items()]
    note = (f"{data.get('measured', '')} libflashattn {data['library']} on one {data['device']}, bf16, batch x rows = 16384, heads x head_dim = 2048, beside "
            f"{others(data, names)}, each row in one process.")
    return note.strip(), lines


def others(gpu, names):
    """The libraries of a run with their versions."""
    versions = {"fa4": f"FlashAttention-4 {gpu.get('fa4', '')}".strip(), "cudnn": f"cuDNN {gpu['cudnn'] // 10000}.{gpu['cudnn'] // 100 % 100}", "fa2": f"FlashAttention-2 of PyTorch {gpu['torch']}"}
    *most, last = [versions[name] for name in names]
    return f"{', '.join(most)} and {last}"


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


def headline(gpu):
    """The README's one number."""
    grid, names = grid_of(gpu)

    def times(direction):
        return [f"{mean([over(row['tflops'], name) for row in grid if row['direction'] == direction]):.2f}" for name in names]

    forward = [f"{ratio} times as fast as {LIBRARIES[name]}" for ratio, name in zip(times("forward"), names)]
    return (f"**On one {gpu['device']} the forward pass is {', '.join(forward[:-1])} and {forward[-1]}**\n"
            f"(geometric means over {sum(row['direction'] == 'forward' for row in grid)} shapes in bf16, each measured in one process). "
            f"For the backward pass these are {', '.join(times('backward')[:-1])} and {times('backward')[-1]}.")


def spread(ratios):
    return f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def speed_table(peers, gpu, cpu):
    """What a stranger reads once: the README's table."""
    grid, names = grid_of(gpu)
    fa3 = by_shape(peers)
    lines = ["| bf16 | TFLOP/s at 16k rows: full, causal | " + " | ".join(f"times {LIBRARIES[name]}" for name in names) + " | times FlashAttention-3 (1) |",
             "|---" * (3 + len(names)) + "|"]
    for direction, head_dim in dict.fromkeys((row["direction"], row["head_dim"]) for row in grid):
        rows = [row for row in grid if (row["direction"], row["head_dim"]) == (direction, head_dim) and row["heads_q"] == row["heads_k"]]
        speeds = [f"{row['tflops']['ours']:.0f}" for row in sorted(rows, key=lambda row: row["causal"]) if row["seqlen_q"] == 16384]
        cells = [spread([over(row["tflops"], name) for row in rows]) for name in names]
        cells.append(spread([over(row, "fa3") for mask in ("full", "causal") for row in fa3[direction, head_dim, mask].values()]))
        lines.append(f"| {direction}, head_dim {head_dim} | {', '.join(speeds)} | {' | '.join(cells)} |")
    rows = [row for row in cpu["rows"] if row["pass"] in ("forward", "backward")]
    fractions = [100 * row["fraction"] for row in rows]
    note = (f"One {gpu['device']}, libflashattn beside {others(gpu, names)}, each row in one process.\n"
            "Ratios above 1 mean that libflashattn is faster; each is a geometric mean "
            "over sequences of 512 to 16384 rows, full and causal, with the smallest and the largest in brackets.\n"
            f"(1) In another process, on one {peers['device']}, with the library of {peers['measured']}.\n"
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
    return between(SPEED, *speed_table(peers, gpu, cpu), between(HEADLINE, headline(gpu), [], text))


def measured(peers, gpu, cpu, text):
    """docs/measured.md with the tables of these runs."""
    for markers, table in ((PEERS, peers_table(peers)), (GPU, gpu_table(gpu)), (CPU, cpu_table(cpu))):
        text = between(markers, *table, text)
    return text
