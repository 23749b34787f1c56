#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Objects compiled for one instruction set share no code with the others: every function that the linker could merge stands in the
instruction set's own namespace. Otherwise a std:: template compiled for AVX-512 may be the copy that every processor runs.

usage: check_isa_objects.py OBJECT...
"""
import re
import subprocess
import sys


def main():
    checked, problems = 0, []
    for path in sys.argv[1:]:
        isa = re.search(r"_(amx|avx2|avx512|avx512_bf16|neon|neon_bf16|neon_fhm|portable|sve256)\.cpp\.o$", path)
        if not isa:
            continue
        checked += 1
        symbols = subprocess.run(["nm", "--demangle", "--defined-only", path], check=True, capture_output=True, text=True).stdout
        for line in symbols.splitlines():
            _, kind, name = line.split(maxsplit=2)
            if kind == "W" and f"fa::cpu::{isa.group(1)}::" not in name:
                problems.append(f"{path}: {name}")
    print("\n".join(problems))
    print(f"{checked} objects, {len(problems)} functions that the linker could merge")
    return 1 if problems or checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
