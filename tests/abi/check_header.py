#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the public headers alone in every language version with every compiler found, pedantic and with warnings as errors.

usage: check_header.py INCLUDE_DIR GENERATED_INCLUDE_DIR MAX_LINES
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

C_STANDARDS = ["c89", "c99", "c11", "c17", "c2x"]
CXX_STANDARDS = ["c++98", "c++03", "c++11", "c++14", "c++17", "c++20", "c++2b"]
COMPILERS = [("gcc", "c"), ("g++", "c++"), ("clang", "c"), ("clang++", "c++")]
FLAGS = ["-pedantic-errors", "-Wall", "-Wextra", "-Wpadded", "-Wundef", "-Wshadow", "-Werror", "-fsyntax-only"]
# The loader has `static inline` functions and <dlfcn.h>: C99 and C++.
HEADERS = {"flashattn/flashattn.h": C_STANDARDS + CXX_STANDARDS,
           "flashattn/flashattn_dist.h": C_STANDARDS + CXX_STANDARDS,
           "flashattn/version.h": C_STANDARDS + CXX_STANDARDS,
           "flashattn/flashattn_dl.h": C_STANDARDS[1:] + CXX_STANDARDS,
           "flashattn/flashattn.hpp": CXX_STANDARDS[CXX_STANDARDS.index("c++17"):]}


def main():
    include, generated, max_lines = sys.argv[1:]
    failures = compiled = 0
    with tempfile.TemporaryDirectory() as folder:
        for compiler, language in COMPILERS:
            if shutil.which(compiler) is None:
                print(f"skipped: no {compiler}")
                continue
            for header, standards in HEADERS.items():
                for standard in standards:
                    if standard.startswith("c++") != (language == "c++"):
                        continue
                    source = Path(folder) / ("main.c" if language == "c" else "main.cpp")
                    # Twice: the include guard works. A declaration after it: ISO C wants a translation unit not to be empty.
                    source.write_text(f'#include "{header}"\n#include "{header}"\nint defined_here = 0;\n')
                    command = [compiler, f"-std={standard}", *FLAGS, "-I", include, "-I", generated, str(source)]
                    result = subprocess.run(command, capture_output=True, text=True)
                    compiled += 1
                    if result.returncode != 0:
                        failures += 1
                        print(f"FAILED: {' '.join(command)}  # {header}\n{result.stderr}")

    lines = len((Path(include) / "flashattn/flashattn.h").read_text().splitlines())
    print(f"{compiled} compilations, {failures} failed; flashattn.h has {lines} lines of at most {max_lines}")
    return 1 if failures or compiled == 0 or lines > int(max_lines) else 0


if __name__ == "__main__":
    sys.exit(main())
