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


# Processors that qemu has, with the features that count here: bf16 products, fp16 products in fp32, SVE of exactly 256 bits. `max` has SVE of 512.
FEATURES = {"max": {"neon_bf16", "neon_fhm"}, "max,sve256=on": {"neon_bf16", "neon_fhm", "sve256"}, "cortex-a72": set()}


# The kernel that must run a problem, or None: a refusal. `decoding`: one query per key head, otherwise 64.
def expected_kernel(processor, asked, dtype, decoding):
    features = FEATURES[processor] | {"portable", "neon"}
    if asked == "auto":
        asked = next(isa for isa in ("neon_bf16", "sve256", "neon_fhm", "neon") if isa in features)
    if asked not in features:
        return None
    isa = asked
    if asked in ("neon_bf16", "neon_fhm") and not (asked == "neon_bf16" and dtype == "bf16"):
        isa = "sve256" if "sve256" in features else "neon"
        if dtype == "fp16" and "neon_fhm" in features and (asked == "neon_fhm" or isa == "neon"):
            isa = "neon_fhm" if decoding else "neon"
    return f"cpu_fwd_{'vector' if decoding else 'split'}_{isa}"


# The instruction set is chosen at run time, and a sentence comes where one is asked for that the processor lacks.
def isa(folder):
    wrong = 0
    for processor in FEATURES:
        for asked in ("auto", "portable", "neon", "neon_fhm", "neon_bf16", "sve256", "avx2"):
            for dtype in ("bf16", "fp16", "fp32") if asked in ("auto", "neon_bf16", "sve256") else ("bf16", "fp16"):
                for decoding in (False, True):
                    found = emulate(folder, processor, "bindings/cli/flashattn", "explain", "--q", "1x1x2x64" if decoding else "1x64x2x64", "--dtype",
                                    dtype, "--device", "cpu", "--isa", asked, capture_output=True, text=True)
                    said = found.stdout + found.stderr
                    kernels = re.findall(r"^kernel +(\S+)$", said, re.MULTILINE)
                    expected = expected_kernel(processor, asked, dtype, decoding)
                    if expected is None:
                        right = found.returncode != 0 and "FA_ERROR_ARCH: cpu_isa is" in said
                    else:
                        right = found.returncode == 0 and kernels == [expected]
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
