#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every C, C++ and CUDA file, templates (*.in) included, begins with its licence and (but for templates) is as clang-format 14 makes it; exits 77 (skipped) without that tool.

usage: check_format.py SOURCE_DIR
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "14"  # others format a few constructs differently
FOLDERS = ["include", "src", "tests", "bindings"]
SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh", ".hpp", ".inc"}
TEMPLATE = re.compile(r"\.(c|h|cpp|cu|cuh)\.in$")  # their @VARIABLES@ are no C++: the licence alone is checked


def clang_format():
    for name in (f"clang-format-{VERSION}", "clang-format"):
        path = shutil.which(name)
        if path:
            text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            if re.search(rf"version {VERSION}\.", text):
                return path
    return None


def main():
    root = Path(sys.argv[1])
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*")
                   if (file.suffix in SUFFIXES or TEMPLATE.search(file.name)) and "target" not in file.relative_to(root).parts)
    if not files:
        print(f"{root} has no source files")
        return 1
    unlicensed = [file for file in files if "SPDX-License-Identifier: Apache-2.0" not in file.read_text().split("\n", 1)[0]]
    print("\n".join(f"{file}: the first line is not its licence" for file in unlicensed))
    tool = clang_format()
    if tool is None:
        print(f"no clang-format {VERSION}: formatting not checked")
        return 1 if unlicensed else 77
    result = subprocess.run([tool, "--dry-run", "--Werror", *(str(file) for file in files if file.suffix in SUFFIXES)], capture_output=True, text=True)
    print(result.stderr)
    print(f"{len(files)} files, {len(unlicensed)} without licence, formatting {'differs' if result.returncode else 'clean'}")
    return 1 if unlicensed or result.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
