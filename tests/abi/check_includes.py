#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dependencies in src/ point one way: api -> core -> launch headers of the backends; kernels see core, cuda/common and their own family.

usage: check_includes.py SRC_DIR

Each file that is compiled or included is read, templates of kernel instances (*.cu.in) included.
"""
import re
import sys
from pathlib import Path

SUFFIXES = (".h", ".inc", ".cpp", ".cu", ".cuh", ".cu.in", ".cpp.in", ".h.in")

# What the files of a folder may include from src/, as prefixes. The longest folder decides. The public headers are open to all.
LAYERS = {
    "api": ("api/", "core/", "cpu/launch.h", "cuda/launch.h"),
    "core": ("core/",),
    "cpu": ("core/", "cpu/"),
    "cuda": ("core/", "cuda/"),
    "cuda/common": ("core/", "cuda/common/"),
}
# Every other folder of cuda/ is a family of kernels: core, cuda/common and itself, and what stands here with its reason.
EXCEPTIONS = {
    "cuda/extend": {
        "cuda/decode/decode.h": "its parameters: a decode problem with more rows",
        "cuda/decode/planner.cuh": "stream-K partition of the KV tiles, as in decode",
        "cuda/decode/boxes.cuh": "TMA boxes of contiguous and paged KV",
        "cuda/decode/bytes.cuh": "8-bit KV: widening and descales",
        "cuda/decode/softcap.cuh": "softcap of the scores, as in decode",
        "cuda/decode/sums.cuh": "the combine kernel of split-KV partials",
    },
    "cuda/latent": {
        "cuda/decode/decode.h": "its parameters: a decode problem whose values are columns of the keys",
        "cuda/decode/planner.cuh": "stream-K partition of the KV tiles, as in decode",
        "cuda/decode/boxes.cuh": "TMA boxes of contiguous and paged KV",
    },
}
# Never, by anyone: other people's kernels and frameworks. cuBLAS is for tests.
FORBIDDEN = re.compile(r"cutlass|cute/|cublas|cudnn|torch|ATen/|cblas|mkl|omp\.h|dnnl|openblas", re.I)


def rule_of(path):
    """The folder whose rule holds for a file, and the prefixes it may include; (None, ()) where there is no rule."""
    parts = path.split("/")[:-1]
    if len(parts) > 1 and parts[0] == "cuda" and parts[1] != "common":
        family = "/".join(parts[:2])
        return family, ("core/", "cuda/common/", family + "/")
    for length in range(len(parts), 0, -1):
        folder = "/".join(parts[:length])
        if folder in LAYERS:
            return folder, LAYERS[folder]
    return None, ()


def check(root):
    """The number of files read and a line for each problem."""
    problems, files, used = [], 0, set()
    for file in sorted(root.rglob("*")):
        if not file.name.endswith(SUFFIXES):
            continue
        files += 1
        path = file.relative_to(root).as_posix()
        folder, allowed = rule_of(path)
        if folder is None:
            problems.append(f"{path}: no rule for its folder; add one")
            continue
        exceptions = EXCEPTIONS.get(folder, {})
        for number, line in enumerate(file.read_text().splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not include:
                continue
            quote, target = include.groups()
            where = f"{path}:{number}: #include {target}"
            # <...> names what is outside src/, unless src/ has such a file.
            ours = not target.startswith("flashattn/") and (quote == '"' or (root / target).is_file())
            if FORBIDDEN.search(target):
                problems.append(f"{where}: forbidden")
            elif ours and target in exceptions:
                used.add((folder, target))
            elif ours and not target.startswith(allowed):
                problems.append(f"{where}: {folder} may include {', '.join(allowed)} and flashattn/")
    for folder, exceptions in EXCEPTIONS.items():
        for target in exceptions:
            if (folder, target) not in used:
                problems.append(f"EXCEPTIONS[{folder}][{target}]: no file needs it any more; delete it")
    if files == 0:
        problems.append(f"{root} has no source files")
    return files, problems


def main():
    files, problems = check(Path(sys.argv[1]))
    print("\n".join(problems))
    print(f"{files} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
