#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts what the redesign of the CUDA kernels is to make smaller, in the working tree or in any git revision.

usage: count_source.py [--rev REVISION ...] [--list]

--rev may be given several times and prints a column for each revision; without it the files of the working tree are counted. --list prints
every counted verb, as file:line name, and the ten largest files and functions.

How it counts, over src/cuda/**/*.{cu,cuh,h,cpp,cu.in}:
lines          all lines, comments and empty ones included.
verbs          definitions (a body in braces, at namespace or class scope) of functions outside src/cuda/common whose name is one of VERBS.
               Declarations, calls, lambdas, macros and functions that only compute an address do not count. A name is in one group only,
               the first of VERBS that matches.
using          names that `using A::x, B::y;` brings into a class or function: one for each name, alias declarations (`using A = B`) none.
largest file   by lines.
largest        function by lines, from the line of its name to that of its closing brace. A class template whose member functions make one
  function     kernel is many functions.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "src/cuda"
FILES = re.compile(r"\.(cu|cuh|h|cpp|cu\.in)$")
COMMON = re.compile(r"^src/cuda/common/")

# Names of functions that do the work of one verb: those of the first kernels, and the field's words that replace them.
VERBS = {
    "NaN-safe": r"\w*(exactly|careful)\w*|nan_safe\w*|\w*has_non_?finite|has_nan|\w+_has_nan|holds_nonfinite|group_finds|mend|repair|needs_care\w*"
                r"|zero_if_\w*finite|redo_\w+",
    "combine": r"add_parts|take_parts|over_parts|store_part|store_split|put_aside|hand_over"
               r"|add_merge|merge\w*|combine\w*|add_all|add_other|add_shares?|put_share|store_partial\w*|each_partial|sum_kernel",
    "epilogue": r"store_(out|lse|row|rows|whole|blind_rows|unused_rows|staged_rows|pieces|gradient|empty\w*)|stage_rows"
                r"|close|close_row|finish|finish_(sums|half|block|dq)|clear_(out|tail)|zero_row|add_sink|scale_out|epilogue\w*",
    "mask": r"mask|masked|mask_\w+|may_mask|for_masked|put_masked|mark_masked|visible|any_visible|find_seen|columns_below|elements_below"
            r"|keys_of_row|leave_out|drop|warp_sees|is_visible|tile_state",
    "softmax": r"softmax\w*|weigh|weigh_\w+|weights|\w+_weights|exponentials?|exponentiate\w*|raise|raise_\w+|start_scores|finish_scores"
               r"|scores_again|exponent_scale|top_score|highest|round|rescale\w*|row_(max|sum)\w*|update_max\w*|logarithms",
}
VERBS = {group: re.compile(f"(?:{names})\\Z") for group, names in VERBS.items()}
NO_FUNCTION = re.compile(r"(?:if|for|while|switch|return|else|do|catch)\b|.*(?:=|\breturn)\s*(?:\[|$)", re.S)
QUALIFIER = re.compile(r"__launch_bounds__|__cluster_dims__|__align__|alignas|decltype|requires|noexcept|__attribute__")


def git(*arguments):
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


def sources(revision):
    """Path and text of every counted file."""
    if revision is None:
        names = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / FOLDER).rglob("*") if path.is_file())
        return [(name, (ROOT / name).read_text()) for name in names if FILES.search(name)]
    names = git("ls-tree", "-r", "--name-only", revision, FOLDER).splitlines()
    return [(name, git("show", f"{revision}:{name}")) for name in names if FILES.search(name)]


def code_of(text):
    """The text without comments, strings and preprocessor lines, with as many lines."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def name_of(header):
    """The function that a text before an opening brace defines, and where its name stands; (None, 0) if it defines none."""
    depth = 0
    for at, letter in enumerate(header):
        if letter == "(" and depth == 0:
            found = re.search(r"(~?\w+|operator\s*\S+)\s*\Z", header[:at])
            if found and not QUALIFIER.fullmatch(found[1]):
                return found[1], found.start()
        depth += {"(": 1, ")": -1}.get(letter, 0)
    return None, 0


def functions_of(code):
    """Name, first and last line of every function defined at namespace or class scope."""
    code = re.sub(r"(\b\w+_)\{([^{}]*)\}", r"\1(\2)", code)  # members initialised by braces
    scopes, functions, begin = [], [], 0
    for found in re.finditer(r"[{};]", code):
        at, letter = found.start(), found[0]
        if letter == "{":
            header = code[begin:at]
            text = header.strip()
            name = start = None
            if not any(scope[0] == "function" for scope in scopes):
                if re.search(r"\bnamespace\b", text) or re.match(r"extern\s+\"?\s*\"?$", text):
                    kind = "open"
                elif re.match(r"(template\s*<.*>\s*)?(class|struct|union)\b[^()]*\Z", re.sub(r"\w+\([^()]*\)", "", text), re.S):
                    kind = "open"
                else:
                    name, offset = name_of(header)
                    kind = "function" if name and not NO_FUNCTION.match(text) else "block"
                    start = code.count("\n", 0, begin + offset) + 1
            else:
                kind = "block"
            scopes.append((kind, name, start))
        elif letter == "}" and scopes:
            kind, name, start = scopes.pop()
            if kind == "function":
                functions.append((name, start, code.count("\n", 0, at) + 1))
        begin = at + 1
    return functions


def usings_of(code):
    return [name for text in re.findall(r"\busing\s+([^;={}]*::[^;={}]*);", code) if not text.startswith("namespace")
            for name in text.split(",")]


def group_of(name):
    return next((group for group, names in VERBS.items() if names.match(name)), None)


def count(revision):
    files = [(path, text, code_of(text)) for path, text in sources(revision)]
    if not files:
        sys.exit(f"{revision or 'the working tree'} has no files in {FOLDER}")
    functions = [(path, *function) for path, _, code in files for function in functions_of(code)]
    verbs = [(group_of(name), path, first, name) for path, name, first, _ in functions if not COMMON.match(path) and group_of(name)]
    return {
        "files": sorted(((len(text.splitlines()), path) for path, text, _ in files), reverse=True),
        "verbs": verbs,
        "using": sum(len(usings_of(code)) for _, _, code in files),
        "functions": sorted(((last - first + 1, f"{path}:{first} {name}") for path, name, first, last in functions), reverse=True),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rev", action="append", help="a git revision; the working tree if left out")
    parser.add_argument("--list", action="store_true", help="also print what was counted")
    arguments = parser.parse_args()
    columns = arguments.rev or [None]
    counts = [count(revision) for revision in columns]

    def row(title, value):
        print(f"| {title} | " + " | ".join(str(value(c)) for c in counts) + " |")

    print("| | " + " | ".join(revision or "working tree" for revision in columns) + " |")
    print("|---|" + "---|" * len(columns))
    row("lines of src/cuda", lambda c: sum(lines for lines, _ in c["files"]))
    row("functions defined", lambda c: len(c["functions"]))
    row("verbs defined outside common", lambda c: len(c["verbs"]))
    for group in reversed(VERBS):
        row(f"- {group}", lambda c: sum(verb[0] == group for verb in c["verbs"]))
    row("names re-exported by using", lambda c: c["using"])
    row("largest file", lambda c: "{0[1]}, {0[0]} lines".format(c["files"][0]))
    row("largest function", lambda c: "{0[1]}, {0[0]} lines".format(c["functions"][0]))
    if arguments.list:
        for revision, c in zip(columns, counts):
            print(f"\n{revision or 'working tree'}")
            for group, path, line, name in sorted(c["verbs"]):
                print(f"  {group}: {path}:{line} {name}")
            for kind in ("files", "functions"):
                for lines, name in c[kind][:10]:
                    print(f"  {lines} lines: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
