#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dependencies in src/ point one way: api -> dist -> core -> launch headers of the backends; kernels see core, cuda/common and their own
family.

usage: check_includes.py SRC_DIR

Each file that is compiled or included is read, templates of kernel instances (*.cu.in) included.
"""
import re
import sys
from pathlib import Path

SUFFIXES = (".h", ".inc", ".cpp", ".cu", ".cuh", ".cu.in", ".cpp.in", ".h.in")

# What the files of a folder may include from src/, as prefixes. The longest folder decides. The public headers are open to all.
LAYERS = {
    "api": ("api/", "core/", "cpu/launch.h", "dist/"),
    "core": ("core/",),
    "dist": ("core/", "dist/"),
    "cpu": ("core/", "cpu/"),
    "cuda/host": ("core/", "cuda/"),
    "cuda/common": ("core/", "cuda/common/"),
    "cuda/rtc": (),  # stands in for system headers
}
# Every folder of cuda/kernels/ is a kernel. It includes core, cuda/common and itself, and what stands here with its reason: a file or a folder.
BWD_ROWS = {"cuda/kernels/bwd_pre_post/": "delta and lse of the rows before, conversion of dq after the main kernel"}
EXCEPTIONS = {
    "cuda/kernels/extend": {"cuda/kernels/decode/": "parameters, stream-K partition and combine kernel of decode"},
    "cuda/kernels/mla": {"cuda/kernels/decode/": "parameters and stream-K partition of decode"},
    "cuda/kernels/bwd_simt": {**BWD_ROWS, "cuda/kernels/fwd_simt/": "tiles on CUDA cores"},
    "cuda/kernels/bwd_sm80": BWD_ROWS,
    "cuda/kernels/bwd_sm90_fp32": {**BWD_ROWS, "cuda/kernels/bwd_sm90/": "hidden and dropped pairs of S^T in a wgmma accumulator"},
    "cuda/kernels/fwd_sm90": {"cuda/kernels/fwd_sm90_wide/": "one table and one instance template for both kernels"},
    "cuda/kernels/fwd_sm90_wide": {"cuda/kernels/fwd_sm90/": "parameters"},
    "cuda/kernels/bwd_sm90": {**BWD_ROWS,
                              "cuda/kernels/bwd_sm90_cluster/": "one table and one instance template for all kernels",
                              "cuda/kernels/bwd_sm90_separate/": "the same"},
    "cuda/kernels/bwd_sm90_cluster": {"cuda/kernels/bwd_sm90/": "work descriptor, P and dS, gradients to global memory"},
    "cuda/kernels/bwd_sm90_separate": {"cuda/kernels/bwd_sm90/": "work descriptor, P and dS, gradients to global memory"},
}
# Never, by anyone: other people's kernels and frameworks. cuBLAS is for tests.
FORBIDDEN = re.compile(r"cutlass|cute/|cublas|cudnn|torch|ATen/|cblas|mkl|omp\.h|dnnl|openblas", re.I)


def rule_of(path):
    """The folder whose rule holds for a file, and the prefixes it may include; (None, ()) where there is no rule."""
    parts = path.split("/")[:-1]
    if len(parts) > 2 and parts[:2] == ["cuda", "kernels"]:
        family = "/".join(parts[:3])
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
            elif ours and any(target.startswith(exception) for exception in exceptions):
                used.update((folder, exception) for exception in exceptions if target.startswith(exception))
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
