#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every relative link of the guides and READMEs leads to a file.

usage: check_links.py SOURCE_DIR
"""
import re
import sys
from pathlib import Path


def main():
    root = Path(sys.argv[1])
    guides = [path for pattern in ("*.md", "docs/**/*.md", "bindings/**/*.md", "src/**/*.md", "tests/**/*.md")
              for path in sorted(root.glob(pattern)) if "target" not in path.parts]
    links, problems = 0, []
    for guide in guides:
        text = re.sub(r"^```.*?^```", "", guide.read_text(), flags=re.S | re.M)  # f[T](x) is a call there
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            if not (guide.parent / target).exists():
                problems.append(f"{guide.relative_to(root)}: {target}")
    print("\n".join(problems))
    print(f"{len(guides)} files, {links} links, {len(problems)} lead nowhere")
    return 1 if problems or links == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
