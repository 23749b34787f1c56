#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the built shared library shows to the world: exports, SONAME, dependencies, protections, size.

usage: check_library.py LIBRARY SYMBOLS_TXT SONAME MAX_STRIPPED_BYTES [--sanitized]
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# A plugin host has these already. No OpenMP, no BLAS, no CUDA driver: the library loads on any machine.
ALLOWED_NEEDED = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux.*)\.so\.\d+$")
SANITIZER_NEEDED = re.compile(r"lib[atu]b?san\.so\.\d+$")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def stripped_size(library):
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stripped.so"
        shutil.copy(library, copy)
        run("strip", "--strip-unneeded", str(copy))
        return os.path.getsize(copy)


def main():
    library, symbols, soname, max_bytes = sys.argv[1:5]
    sanitized = "--sanitized" in sys.argv[5:]
    problems = []

    wanted = set(re.findall(r"^fa_\w+$", Path(symbols).read_text(), flags=re.M))
    exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()}
    problems += [f"exported but not in {symbols}: {name}" for name in sorted(exported - wanted)]
    problems += [f"in {symbols} but not exported: {name}" for name in sorted(wanted - exported)]

    dynamic = run("readelf", "--wide", "--dynamic", library)
    found = re.search(r"\(SONAME\).*\[(.*)\]", dynamic)
    if not found or found.group(1) != soname:
        problems.append(f"SONAME is {found and found.group(1)}, not {soname}")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    for name in needed:
        if not ALLOWED_NEEDED.match(name) and not (sanitized and SANITIZER_NEEDED.match(name)):
            problems.append(f"depends on {name}")
    if "(RPATH)" in dynamic or "(RUNPATH)" in dynamic:
        problems.append("has a run path")
    if "(TEXTREL)" in dynamic:
        problems.append("has text relocations")
    if not re.search(r"\bNOW\b", dynamic):
        problems.append("is not linked with -z now")

    segments = run("readelf", "--wide", "--program-headers", library)
    if "GNU_RELRO" not in segments:
        problems.append("is not linked with -z relro")
    if re.search(r"GNU_STACK.* RWE ", segments):
        problems.append("has an executable stack")

    size = stripped_size(library)
    if not sanitized and size > int(max_bytes):
        problems.append(f"is {size} bytes stripped; the budget is {max_bytes}")

    print("\n".join(f"{library}: {problem}" for problem in problems))
    print(f"{len(exported)} exports, needs {', '.join(needed)}, {size} bytes stripped, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
