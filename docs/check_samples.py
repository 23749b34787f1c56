#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every code block of the guides and READMEs is code that something compiles and runs.

c, cpp, go, rust, julia   quotes, up to indentation, a source file of the binding, which its tests build and run, or the gallery of score functions
python                    only in bindings/python/README.md, whose blocks the package's tests execute
sh                        is run here, or is one of the README's two commands, which CI runs
console                   is run here; every line must begin with the word that the guide shows

Commands run in a folder that looks like a checkout, with the build tree at build/release. A block whose tool is missing is reported as not run.

Lines of the README's table "Switching" are parts of such sources, commands that are run here, or lines that the package's tests execute.

usage: check_samples.py SOURCE_DIR BUILD_DIR [--no-run]
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

SOURCES = {"c": "bindings/c/**/*.c", "cpp": "bindings/cpp/*.cpp tests/reference/score_gallery.cpp", "go": "bindings/go/**/*.go", "rust": "bindings/rust/*/**/*.rs",
           "julia": "bindings/julia/**/*.jl"}
TOOLS = ("go", "julia", "pip", "cargo")
# What the README's table shows: the language of the line. Lines in Python, and those of vLLM and SGLang, are run by bindings/python/tests/test_switch.py.
SWITCHES = {"PyTorch": "python", "diffusers": "python", "transformers": "python", "vLLM 0.33": "python", "SGLang 0.5.23": "python", "JAX": "python", "NumPy": "python",
            "ONNX Runtime": "python", "llm.c": "sh", "ggml": "c", "C": "c", "C++": "cpp", "Rust": "rust", "candle": "rust", "Burn": "rust", "Go": "go", "Julia": "julia"}


def guides(root):
    return [path for pattern in ("*.md", "docs/**/*.md", "bindings/*/README.md") for path in sorted(root.glob(pattern))]


def blocks(text):
    """(line, language, code) of every fenced block; blocks without a language are pictures and formats, not code."""
    for match in re.finditer(r"^```([a-z+]+)\n(.*?)^```$", text, flags=re.S | re.M):
        yield text[: match.start()].count("\n") + 1, match.group(1), match.group(2)


def switches(text):
    """(line, what one uses, what one writes) of the rows of the README's table."""
    begin, end = text.index("<!-- switch table"), text.index("<!-- end of switch table")
    for match in re.finditer(r"^\| \[?([^|\]]+?)(?:\]\([^)]*\)[^|]*)? \| `([^`]+)` \|", text[begin:end], flags=re.M):
        yield text[: begin + match.start()].count("\n") + 1, match.group(1), match.group(2)


def plain(code):
    """Without indentation, comment marks of documentation, and blank lines: what two places have to have in common."""
    lines = (re.sub(r"^\s*//! ?", "", line).strip() for line in code.splitlines())
    return "\n".join(line for line in lines if line)


def quoted_from(root, language, code):
    for path in sorted(path for pattern in SOURCES[language].split() for path in root.glob(pattern)):
        if "target" not in path.parts and f"\n{plain(code)}\n" in f"\n{plain(path.read_text())}\n":
            return path.relative_to(root)
    return None


def part_of(root, language, code):
    for path in sorted(path for pattern in SOURCES[language].split() for path in root.glob(pattern)):
        if "target" not in path.parts and code in path.read_text():
            return path.relative_to(root)
    return None


class Checkout:
    """A folder with everything of the sources, and the build tree where the guides expect it."""

    def __init__(self, root, build, folder):
        self.folder, self.build = Path(folder), Path(build)
        for path in root.iterdir():
            if path.name not in ("build", ".git"):
                (self.folder / path.name).symlink_to(path)
        (self.folder / "build").mkdir()
        (self.folder / "build/release").symlink_to(self.build)

    def run(self, code):
        installed = self.folder / "installed"
        code = code.replace("/tmp/flashattn", str(installed))
        include = f"{self.folder / 'include'}{os.pathsep}{self.build / 'include'}"
        environment = {**os.environ, "CPATH": include, "LIBRARY_PATH": str(self.build), "LD_LIBRARY_PATH": str(self.build), "GOPROXY": "off", "GOFLAGS": "-mod=readonly", "GOCACHE": str(self.build / "bindings/go/cache"),
                       "PIP_NO_INDEX": "1", "PIP_TARGET": str(self.folder / "site"), "PIP_BREAK_SYSTEM_PACKAGES": "1", "PYTHONDONTWRITEBYTECODE": "1",
                       "PATH": f"{self.build / 'bindings/cli'}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=self.folder, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)


def missing_tool(code):
    used = re.findall(r"(?:^|&&|\n)\s*(?:\w+=\S+\s+)*([a-z0-9]+)", code)
    return next((tool for tool in TOOLS if tool in used and shutil.which(tool) is None), None)


def first_words(text):
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def check(root, language, code, guide, checkout):
    """(fine, what is to be said)"""
    if language in SOURCES:
        source = quoted_from(root, language, code)
        return (True, f"as in {source}") if source else (False, f"is in no file of {SOURCES[language]}")
    if language == "python":
        return guide.parent.name == "python", "executed by the package's tests"
    if language not in ("sh", "console"):
        return False, "nobody knows how to check this language"
    commands = "\n".join(code for _, kind, code in blocks((root / "README.md").read_text()) if kind == "sh")
    if language == "sh" and (guide == root / "README.md" or all(line.strip() in commands for line in code.splitlines())):
        return True, "run by CI"
    tool = missing_tool(code)
    if checkout is None or tool:
        return True, f"not run: {f'no {tool} here' if tool else 'asked not to'}"
    shown = None
    if language == "console":
        command, shown = code.split("\n", 1)
        code = command.lstrip("$ ")
    result = checkout.run(code)
    if result.returncode != 0 or (shown is not None and first_words(result.stdout) != first_words(shown)):
        return False, f"exit status {result.returncode}\n{textwrap.indent(result.stdout[-3000:], '    ')}"
    return True, "run"


def check_switch(root, name, code, checkout):
    """(fine, what is to be said)"""
    language = SWITCHES.get(name)
    if language in SOURCES:
        source = part_of(root, language, code)
        return (True, f"as in {source}") if source else (False, f"is in no file of {SOURCES[language]}")
    if language == "python":
        return True, "executed by the package's tests"
    if language is None:
        return False, "nobody knows how to check this row"
    if checkout is None:
        return True, "not run: asked not to"
    # A program that calls attention_forward and attention_backward, as the one of llm.c does, and compares them with fp64.
    shutil.copy(root / "bindings/c/llmc/attention_test.c", checkout.folder / "train_gpt2.c")
    result = checkout.run(f"{code} && ./a.out")
    return (True, "run") if result.returncode == 0 else (False, f"exit status {result.returncode}\n{textwrap.indent(result.stdout[-3000:], '    ')}")


def main():
    root, build = (Path(argument).resolve() for argument in sys.argv[1:3])
    count = problems = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = None if "--no-run" in sys.argv else Checkout(root, build, folder)
        for guide in guides(root):
            for line, language, code in blocks(guide.read_text()):
                fine, words = check(root, language, code, guide, checkout)
                print(f"{guide.relative_to(root)}:{line}: {language}: {'' if fine else 'WRONG: '}{words}", flush=True)
                count += 1
                problems += not fine
        seen = []
        for line, name, code in switches((root / "README.md").read_text()):
            fine, words = check_switch(root, name, code, checkout)
            print(f"README.md:{line}: {name}: {'' if fine else 'WRONG: '}{words}", flush=True)
            seen.append(name)
            problems += not fine
        if sorted(seen) != sorted(SWITCHES):
            print(f"README.md: WRONG: its table has rows for {', '.join(seen)}; they must be {', '.join(SWITCHES)}")
            problems += 1
    print(f"{count} blocks, {problems} wrong")
    return 1 if problems or count < 15 else 0


if __name__ == "__main__":
    sys.exit(main())
