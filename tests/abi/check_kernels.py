#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ptxas said of the CUDA kernels, kept by the build beside each object file.

usage: check_kernels.py GENERAL_BYTES OBJECT... (ends with 77, skipped, when none of them is CUDA)

Plain kernels spill no registers; those of general scores (all shapes in the name of the source end in g, m, b or r, then perhaps n or s, or in all) at
most so many bytes. No kernel makes ptxas serialise warpgroup instructions. Prints every kernel that spills.
"""
import re
import sys
from pathlib import Path

FUNCTION = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALISED = re.compile(r"C75\d\d")  # setmaxnreg ignored, wgmma serialised
GENERAL = re.compile(r"(_(f16|bf16|any))+(_d[0-9_]+([gmbr](64)?[nst]?|all))+\.cu")


def main():
    logs = [Path(name + ".ptxas") for name in sys.argv[2:] if name.endswith(".cu.o")]
    if not logs:
        print("skipped: this build has no CUDA kernels")
        return 77
    problems, kernels, spilling = [], 0, []
    for log in logs:
        if not log.exists():
            problems.append(f"{log} is missing: what ptxas said of this object is not known")
            continue
        text = log.read_text(errors="replace")
        problems += [f"{log.name}: {line.strip()}" for line in text.splitlines() if SERIALISED.search(line)]
        for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text):
            function, frame, registers = FUNCTION.search(part), FRAME.search(part), REGISTERS.search(part)
            if not function:
                continue
            kernels += 1
            if not frame or not registers:
                problems.append(f"{log.name}: no report of {function[1]}")
                continue
            if int(frame[2]) or int(frame[3]):
                line = f"{log.name} {function[2]} {function[1]}: {registers[1]} registers, {frame[0]}"
                spilling.append(line)
                kind, limit = "plain", 0
                if GENERAL.search(log.name):
                    kind, limit = "general", int(sys.argv[1])
                if int(frame[2]) > limit:
                    problems.append(f"{frame[2]} bytes spilled in a {kind} kernel, more than {limit}: {line}")
    if kernels == 0:
        problems.append("no kernel was found in any report")
    print("\n".join(spilling))
    print("\n".join(problems))
    print(f"{len(logs)} objects, {kernels} kernels, {len(spilling)} spill, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
