#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the functions and types of the library with the recorded ones of its SONAME, by libabigail's abidiff.

The record, tests/abi/libflashattn.so.N.abi, is what programs out there were compiled against. Any difference fails: a removal or a change is a break, and an
addition is recorded with the commit that makes it, by --write. Exits 77 (skipped) without libabigail.

usage: check_abi.py LIBRARY INCLUDE_DIR RECORD [--write]
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

library, headers, record = map(Path, sys.argv[1:4])


def describe(path):
    subprocess.run(["abidw", "--exported-interfaces-only", "--drop-private-types", "--headers-dir", headers, "--no-show-locs", "--no-corpus-path",
                    "--no-comp-dir-path", "--no-elf-needed", "--no-architecture", "--type-id-style", "hash", "--out-file", path, library], check=True)
    # Where the sources lay is not the interface.
    path.write_text(re.sub(r" path='[^']*/(src/api/[^']*)'", r" path='\1'", path.read_text()))


def difference(old, new):
    """What abidiff says, "" if nothing."""
    found = subprocess.run(["abidiff", old, new], capture_output=True, text=True)
    if found.returncode & 3:  # not a difference but a failure or a wrong call
        sys.exit(f"abidiff failed: {found.stderr}")
    return found.stdout if found.returncode else ""


def main():
    if not (shutil.which("abidw") and shutil.which("abidiff")):
        print("skipped: no abidw and abidiff (Debian: abigail-tools)")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.abi"
        describe(now)
        if "--write" in sys.argv[4:]:
            shutil.copyfile(now, record)
            return 0
        # The comparison itself: a field that moved and a function that is gone must be seen.
        text = record.read_text()
        moved = re.sub(r"(layout-offset-in-bits=')64(')", r"\g<1>96\2", text)
        gone = re.sub(r"\s*<function-decl name='fa_merge'.*?</function-decl>|\s*<elf-symbol name='fa_merge'[^>]*/>", "", text, flags=re.S)
        for name, spoiled in (("moved", moved), ("gone", gone)):
            other = Path(folder) / f"{name}.abi"
            other.write_text(spoiled)
            if spoiled == text or not difference(record, other):
                print(f"abidiff does not see that something is {name}: this check would not fail")
                return 1
        found = difference(record, now)
        functions = len(re.findall(r"<function-decl name='fa_", text))
        print(found or f"abidiff: {functions} functions and their types are as recorded in {record.name}")
        return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
