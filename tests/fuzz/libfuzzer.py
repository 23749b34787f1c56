#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds struct_fuzz with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, and runs it on the corpus and for a while beyond.
Exits 77 (skipped) without a Clang that brings libFuzzer.

usage: libfuzzer.py SOURCE_DIR BUILD_DIR CMAKE GENERATOR
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

source, build, cmake, generator = sys.argv[1:]
seconds = int(os.environ.get("FA_FUZZ_SECONDS", "10"))
SANITIZERS = "fuzzer-no-link,address,undefined"


def run(*command, **how):
    print("+", " ".join(map(str, command)), flush=True)
    return subprocess.run(list(map(str, command)), check=True, **how)


def run_quietly(*command):
    """Shows what the command printed only if it failed."""
    print("+", " ".join(map(str, command)), flush=True)
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit("\n".join(line for line in done.stdout.splitlines() if "] Building" not in line))


def clang_with_libfuzzer():
    if shutil.which("clang++") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "probe.cpp"
        program.write_text('#include <cstddef>\nextern "C" int LLVMFuzzerTestOneInput(const unsigned char *, size_t) { return 0; }\n')
        built = subprocess.run(["clang++", "-fsanitize=fuzzer,address", program, "-o", Path(folder) / "probe"], capture_output=True)
        return built.returncode == 0


def main():
    if not clang_with_libfuzzer():
        print("skipped: no clang++ with libFuzzer")
        return 77
    run_quietly(cmake, "-G", generator, "-S", source, "-B", build, "-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++",
                "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -gline-tables-only",
                f"-DFA_SANITIZE={SANITIZERS}", "-DFA_WITH_CUDA=OFF", "-DFA_BUILD_BINDINGS=OFF", "-DFA_BUILD_BENCH=OFF",
                "-DFA_BUILD_CLI=OFF", "-DFA_BUILD_DOCS=OFF")
    run_quietly(cmake, "--build", build, "--target", "fa_libfuzzer", "--parallel", os.cpu_count())
    corpus = Path(source) / "tests/fuzz/corpus"
    findings = Path(build) / "findings"
    with tempfile.TemporaryDirectory() as found:  # new inputs; the corpus in the tree stays as it is
        findings.mkdir(exist_ok=True)
        options = ["-max_len=512", "-timeout=20", "-rss_limit_mb=4096", f"-artifact_prefix={findings}/", "-print_final_stats=1"]
        log = run(Path(build) / "tests/fuzz/fa_libfuzzer", found, corpus, f"-max_total_time={seconds}", *options,
                  stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env={
                      **os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1:allocator_may_return_null=1"}).stdout
    last = [line for line in log.splitlines() if " cov: " in line][-1]
    executed = int(re.search(r"stat::number_of_executed_units: (\d+)", log).group(1))
    seeds = len(list(corpus.iterdir()))
    covered = int(re.search(r"cov: (\d+)", last).group(1))
    print(f"{executed} inputs, of them {seeds} of the corpus, {covered} edges covered, 0 crashes")
    # A fuzzer that gets nowhere tests nothing.
    return 0 if executed > seeds and covered > 1000 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(error.stdout or "", error, sep="\n")
        sys.exit(1)
