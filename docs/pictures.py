#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes every picture of the guides and the benchmark tables of the README and of docs/measured.md: drawings from docs/drawings.py, plots and tables from docs/data
(gpu.json of fa_bench_gpu.py, cpu.json of fa_bench_cpu, peers.json of a direct comparison with FlashAttention-3).

    tests/bench/fa_bench_gpu.py --json docs/data/gpu.json && docs/pictures.py

usage: pictures.py [--check]     --check writes nothing and fails where a file is not what this would write
"""
import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT / "tests" / "bench")]
import bench_table  # noqa: E402
import drawings  # noqa: E402
from gpu import plot, report  # noqa: E402


def wanted():
    """{file: text} of everything that is made from something else."""
    files = {DOCS / "pictures" / f"{name}.svg": draw() for name, draw in drawings.ALL.items()}
    peers, gpu, cpu = (json.loads((DOCS / "data" / f"{name}.json").read_text()) for name in ("peers", "gpu", "cpu"))
    gpu["rows"] = [report.add_ratios(row) for row in gpu["rows"]]
    files[DOCS / "pictures" / "gpu_speed.svg"] = plot.svg(gpu)
    files[DOCS / "pictures" / "gpu_memory.svg"] = plot.memory_svg(gpu)
    readme, measured = ROOT / "README.md", DOCS / "measured.md"
    files[readme] = bench_table.readme(peers, gpu, cpu, readme.read_text())
    files[measured] = bench_table.measured(peers, gpu, cpu, measured.read_text())
    return files


def main():
    files = wanted()
    pictures = set((DOCS / "pictures").glob("*"))
    if "--check" not in sys.argv:
        for path in pictures - set(files):
            path.unlink()
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return 0
    problems = [f"{path.relative_to(ROOT)} is not what docs/pictures.py makes" for path, text in files.items()
                if not path.exists() or path.read_text() != text]
    problems += [f"{path.relative_to(ROOT)} is made by nothing" for path in pictures - set(files)]
    guides = "".join(path.read_text() for path in (*ROOT.glob("*.md"), *DOCS.glob("**/*.md")))
    problems += [f"no guide shows {path.relative_to(ROOT)}" for path in files if path.suffix == ".svg" and f"pictures/{path.name})" not in guides]
    print("\n".join(problems) or f"{len(files)} files are as docs/pictures.py makes them")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
