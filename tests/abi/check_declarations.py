#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every declaration of flashattn.h and flashattn_dist.h stands in its golden table and in the list of exports, those of flashattn.h also in
the loader's list, and the reverse.

usage: check_declarations.py FLASHATTN_H FLASHATTN_DL_H SYMBOLS_TXT GOLDEN_INC FLASHATTN_DIST_H GOLDEN_DIST_INC
"""
import re
import sys
from pathlib import Path


def declarations(header):
    """Names declared by a header, by kind."""
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
            function = re.search(r"\(\*(\w+)\)", field)
            field_name = function.group(1) if function else re.search(r"(\w+)(\[\d+\])?$", field).group(1)
            declared["FIELD"].add(f"{name}, {field_name}")
    for typedef in re.findall(r"^typedef (?!struct \w+ \{)([^;]*);", code, flags=re.M):
        pointer = re.search(r"\(\*(\w+)\)", typedef)
        declared["TYPEDEF"].add(pointer.group(1) if pointer else re.search(r"(\w+)$", typedef).group(1))
    return declared


def records(golden):
    """Names in a golden table, by kind."""
    recorded = {kind: set() for kind in ("FUNCTION", "CONSTANT", "STRUCT", "TYPEDEF")}
    for kind, entry in re.findall(r"^(CONSTANT|STRUCT|TYPEDEF|FUNCTION)\((\w+),", golden, flags=re.M):
        recorded[kind].add(entry)
    recorded["FIELD"] = set(re.findall(r"^FIELD\((\w+, \w+),", golden, flags=re.M))
    return recorded


def main():
    header, loader, symbols, golden, dist_header, dist_golden = (Path(path).read_text() for path in sys.argv[1:])
    problems, counts, functions = [], [], set()

    def compare(kind, name, what, expected, found):
        problems.extend(f"{kind} {entry} is not in {what}" for entry in sorted(expected - found))
        problems.extend(f"{kind} {entry} of {what} is not in {name}" for entry in sorted(found - expected))

    for name, text, table in (("flashattn.h", header, golden), ("flashattn_dist.h", dist_header, dist_golden)):
        declared, recorded = declarations(text), records(table)
        for kind in declared:
            if not declared[kind]:
                problems.append(f"no {kind} found in {name}: this check no longer understands it")
            compare(kind, name, f"the golden table of {name}", declared[kind], recorded[kind])
        functions |= declared["FUNCTION"]
        counts.append(name + ": " + ", ".join(f"{len(entries)} {kind.lower()}s" for kind, entries in declared.items()))
    compare("FUNCTION", "the headers", "symbols.txt", functions, set(re.findall(r"^fa_\w+$", symbols, flags=re.M)))
    compare("FUNCTION", "flashattn.h", "FA_DL_FUNCTIONS", declarations(header)["FUNCTION"],
            set(re.findall(r"X\([^()]*?\b(fa_\w+), \(", loader)))

    print("\n".join(problems))
    print("; ".join(counts), f"- {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
