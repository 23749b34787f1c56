#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every declaration of flashattn.h stands in the golden table, in the loader's list and in the list of exports, and the reverse.

usage: check_declarations.py FLASHATTN_H FLASHATTN_DL_H SYMBOLS_TXT GOLDEN_INC
"""
import re
import sys
from pathlib import Path


def main():
    header, loader, symbols, golden = (Path(path).read_text() for path in sys.argv[1:])
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.S)

    declared = {
        "FUNCTION": set(re.findall(r"^FA_API\b[^;]*?\b(fa_\w+)\s*\(", code, flags=re.M)),
        "CONSTANT": set(re.findall(r"^\s+(FA_\w+)\s*=", code, flags=re.M)),
        "STRUCT": set(),
        "FIELD": set(),
        "TYPEDEF": set(),
    }
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} ?(\w+);", code, flags=re.S):
        declared["STRUCT"].add(name)
        for field in filter(None, (f.strip() for f in body.split(";"))):
            field_name = re.search(r"(\w+)(\[\d+\])?$", field).group(1)
            declared["FIELD"].add(f"{name}, {field_name}")
    for typedef in re.findall(r"^typedef (?!struct \w+ \{)([^;]*);", code, flags=re.M):
        pointer = re.search(r"\(\*(\w+)\)", typedef)
        declared["TYPEDEF"].add(pointer.group(1) if pointer else re.search(r"(\w+)$", typedef).group(1))

    recorded = {kind: set() for kind in declared}
    for kind, entry in re.findall(r"^(CONSTANT|STRUCT|TYPEDEF|FUNCTION)\((\w+),", golden, flags=re.M):
        recorded[kind].add(entry)
    recorded["FIELD"] = set(re.findall(r"^FIELD\((\w+, \w+),", golden, flags=re.M))

    problems = []

    def compare(kind, what, expected, found):
        problems.extend(f"{kind} {entry} is not in {what}" for entry in sorted(expected - found))
        problems.extend(f"{kind} {entry} of {what} is not in flashattn.h" for entry in sorted(found - expected))

    for kind in declared:
        if not declared[kind]:
            problems.append(f"no {kind} found in flashattn.h: this check no longer understands it")
        compare(kind, "the golden table", declared[kind], recorded[kind])
    compare("FUNCTION", "symbols.txt", declared["FUNCTION"], set(re.findall(r"^fa_\w+$", symbols, flags=re.M)))
    compare("FUNCTION", "FA_DL_FUNCTIONS", declared["FUNCTION"], set(re.findall(r"X\([^()]*?\b(fa_\w+), \(", loader)))

    print("\n".join(problems))
    print(", ".join(f"{len(entries)} {kind.lower()}s" for kind, entries in declared.items()), f"- {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
