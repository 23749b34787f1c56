#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the README's benchmark table from the JSON of fa_bench_cpu, run on this machine with the library of this build.

    build/release/tests/bench/fa_bench_cpu --json bench.json && docs/bench_table.py bench.json

usage: bench_table.py JSON [README]
"""
import json
import platform
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

BEGIN = "<!-- benchmark table: written by docs/bench_table.py from the JSON of fa_bench_cpu; do not edit by hand -->"
END = "<!-- end of benchmark table -->"


def machine():
    cpuinfo = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", cpuinfo)
    model = re.search(r"model\s*: (\d+)", cpuinfo)
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    cores = len(re.findall(r"^processor\s*:", cpuinfo, flags=re.M))
    return f"{name.group(1) if name else platform.machine()} (model {model.group(1) if model else '?'}), {cores} cores; {compiler}"


def cell(row):
    """Speed, and beside it the fraction of what the machine could do in the same second."""
    if row is None:
        return ""
    speed = f"{row['gbytes']:.1f} GB/s" if row["pass"] == "decode" else f"{row['gflops']:.0f} GFLOP/s"
    return f"{speed} ({100 * row['fraction']:.0f} %)"


def table(data):
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
        cells = " | ".join(cell(rows.get(t)) for t in threads)
        lines.append(f"| {kind} | {dtype} | {heads} x {head_dim} | {seqlen_q} x {seqlen_k} | {'causal' if causal else 'full'} "
                     f"| {cells} | {ratio} |")
    return "\n".join(lines)


def main():
    data = json.loads(Path(sys.argv[1]).read_text())
    readme = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent.parent / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    note = (f"libflashattn {data['library']}, batch 1, on {machine()}. In brackets the fraction of the fp32 multiply-add peak "
            f"({data['probe_isa']}) or, for decode, of the read bandwidth, probed in the same run; "
            "[docs/performance.md](docs/performance.md) says how.")
    readme.write_text(f"{before}{BEGIN}\n{note}\n\n{table(data)}\n{END}{after}")


if __name__ == "__main__":
    main()
