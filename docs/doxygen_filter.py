#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a guide as Doxygen is to read it: links between guides become links between pages, links to other files become their text.
Doxygen's INPUT_FILTER.

usage: doxygen_filter.py SOURCE_DIR FILE
"""
import re
import sys
from pathlib import Path

root, file = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()


def label(path):
    """The name of a guide's page, from its place in the tree."""
    return "page_" + re.sub(r"[^a-z0-9]+", "_", str(path.relative_to(root).with_suffix("")).lower()).strip("_")


def pages():
    guides = [root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md", *root.glob("docs/**/*.md"), *root.glob("bindings/*/README.md")]
    return {guide.resolve(): label(guide) for guide in guides}


def link(match):
    text, target = match.group(1), match.group(2).split("#")[0]
    if re.match(r"[a-z]+:", target):
        return match.group(0)
    page = pages().get((file.parent / target).resolve())
    # A link's text may be code, which \ref would show with its marks.
    return f'\\ref {page} "{text.strip("`")}"' if page else text


def main():
    known = pages()
    if file not in known:
        sys.stdout.write(file.read_text())
        return
    lines, code, titled = [], False, False
    for line in file.read_text().splitlines():
        if line.startswith("```"):
            code = not code
            # Doxygen knows other names of languages.
            line = re.sub(r"^```(sh|console|go|rust|julia)$", "```", line)
        elif not code:
            if line.startswith("<!--") and line.endswith("-->"):
                continue
            if line.startswith("# ") and not titled:
                titled = True
                line = "" if file == root / "README.md" else f"{line} {{#{known[file]}}}"
                if file == root / "README.md":
                    line = f"\\mainpage libflashattn\n\\anchor {known[file]}\n"
            else:
                line = re.sub(r"!\[([^\]]*)\]\((?:[^)\s/]*/)*([^)\s/]+\.svg)\)", r'\\image html \2 "\1"', line)  # Doxygen's own command finds it in IMAGE_PATH
                line = re.sub(r"\[((?:[^\]`]|`[^`]*`)*)\]\(([^)\s]+)\)", link, line)
        lines.append(line)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
