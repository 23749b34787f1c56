#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the library for 64-bit Arm with a cross compiler and runs programs of that build under qemu-user. Exits 77 (skipped) where the
compiler or qemu is missing.

usage: cross.py build SOURCE_DIR BUILD_DIR CMAKE GENERATOR
       cross.py run BUILD_DIR PROCESSOR PROGRAM ARGUMENT...
       cross.py isa BUILD_DIR
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SYSROOT = "/usr/aarch64-linux-gnu"
PROGRAMS = ["unit_test", "parity_test", "flashattn_cli"]


def skip_without_tools():
    for tool, package in (("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user")):
        if shutil.which(tool) is None:
            print(f"skipped: no {tool} (Debian package {package})")
            sys.exit(77)
    if not Path("/usr/src/googletest/CMakeLists.txt").exists():
        print("skipped: no sources of GoogleTest in /usr/src/googletest (Debian package googletest)")
        sys.exit(77)


def build(source, folder, cmake, generator):
    def run(*command):
        print("+", " ".join(map(str, command)), flush=True)
        subprocess.run(list(map(str, command)), check=True)

    run(cmake, "-G", generator, "-S", source, "-B", folder, f"-DCMAKE_TOOLCHAIN_FILE={source}/src/cmake/aarch64-linux-gnu.cmake",
        "-DCMAKE_BUILD_TYPE=Release", "-DFA_WERROR=ON", "-DFA_WITH_CUDA=OFF", "-DFA_BUILD_BINDINGS=OFF", "-DFA_BUILD_BENCH=OFF",
        "-DFA_BUILD_DOCS=OFF", "-DFA_MANYLINUX=2_28")  # what a wheel has is what is tested
    run(cmake, "--build", folder, "--parallel", os.cpu_count(), "--target", *PROGRAMS)


def emulate(folder, processor, program, *arguments, **how):
    return subprocess.run(["qemu-aarch64", "-L", SYSROOT, "-cpu", processor, str(Path(folder) / program), *arguments], **how)


# The instruction set is chosen at run time: bf16 products where the processor has them, and a sentence where it is asked for what it lacks.
def isa(folder):
    wrong = 0
    for processor, has_bf16 in (("max", True), ("cortex-a72", False)):
        best = "neon_bf16" if has_bf16 else "neon"
        # What is asked for, and what must run: for bf16, and for fp16. None: a refusal.
        for asked, bf16, fp16 in (("auto", best, "neon"), ("portable", "portable", "portable"), ("neon", "neon", "neon"),
                                  ("neon_bf16", "neon_bf16" if has_bf16 else None, "neon" if has_bf16 else None), ("avx2", None, None)):
            for dtype, expected in (("bf16", bf16), ("fp16", fp16)):
                found = emulate(folder, processor, "bindings/cli/flashattn", "explain", "--q", "1x64x2x64", "--dtype", dtype, "--device", "cpu",
                                "--isa", asked, capture_output=True, text=True)
                said = found.stdout + found.stderr
                kernels = re.findall(r"^kernel +(\S+)$", said, re.MULTILINE)
                if expected is None:
                    right = found.returncode != 0 and "FA_ERROR_ARCH: cpu_isa is" in said
                else:
                    right = found.returncode == 0 and kernels == [f"cpu_fwd_split_{expected}"]
                print(f"{'ok' if right else 'WRONG'}: {processor}, --isa {asked}, {dtype}: {kernels or said.strip()}")
                wrong += not right
    return 1 if wrong else 0


def main():
    verb, *rest = sys.argv[1:]
    skip_without_tools()
    if verb == "build":
        return build(*rest)
    if verb == "isa":
        return isa(*rest)
    return emulate(*rest).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(error)
        sys.exit(1)
