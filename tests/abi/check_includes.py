#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dependencies in src/ point one way: api -> core -> launch headers of the backends; kernels see core and their own folder.

usage: check_includes.py SRC_DIR
"""
import re
import sys
from pathlib import Path

# Folder -> what its files may include from src/, as prefixes. The public header is open to all.
ALLOWED = {
    "api": ("api/", "core/", "cpu/launch.h"),
    "core": ("core/",),
    "cpu": ("core/", "cpu/"),
    "cuda/common": ("core/", "cuda/common/"),
    "cuda/kernels": ("core/", "cuda/common/", "cuda/kernels/"),
    "cuda/host": ("core/", "cuda/"),
}
# Never, by anyone: other people's kernels and frameworks. cuBLAS is for tests.
FORBIDDEN = re.compile(r"cutlass|cute/|cublas|cudnn|torch|ATen/|cblas|mkl|omp\.h|dnnl|openblas", re.I)


def rule_for(path):
    folders = [folder for folder in ALLOWED if path.startswith(folder + "/")]
    return max(folders, key=len) if folders else None


def main():
    root = Path(sys.argv[1])
    problems, files = [], 0
    for file in sorted(root.rglob("*")):
        if file.suffix not in {".h", ".cpp", ".inc", ".cu", ".cuh"}:
            continue
        files += 1
        path = file.relative_to(root).as_posix()
        folder = rule_for(path)
        if folder is None:
            problems.append(f"{path}: no rule for its folder; add one")
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not include:
                continue
            quote, target = include.groups()
            where = f"{path}:{number}: #include {target}"
            if FORBIDDEN.search(target):
                problems.append(f"{where}: forbidden")
            elif quote == '"' and not target.startswith("flashattn/") and not target.startswith(ALLOWED[folder]):
                problems.append(f"{where}: {folder} may include {', '.join(ALLOWED[folder])} and flashattn/")
    print("\n".join(problems))
    print(f"{files} files, {len(problems)} problems")
    return 1 if problems or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
