#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the recipes of Conan, conda-forge, Homebrew and vcpkg for a release: the templates of this folder with the version, the address of
the source archive and its checksums.

usage: recipes.py URL ARCHIVE FOLDER      # ARCHIVE: the file that users get from URL; its name is libflashattn-VERSION.tar.gz
"""
import hashlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The program with which each package is tested after it was built.
PROGRAM = HERE.parents[1] / "tests/install/main.c"


def main():
    if len(sys.argv) != 4:
        raise SystemExit("usage: recipes.py URL ARCHIVE FOLDER")
    url, archive, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    named = re.fullmatch(r"libflashattn-(\d+\.\d+\.\d+)\.tar\.gz", archive.name)
    if not named:
        raise SystemExit(f"recipes.py: the archive is {archive.name}; its name must be libflashattn-VERSION.tar.gz")
    content = archive.read_bytes()
    values = {"VERSION": named.group(1), "URL": url}
    values.update({name.upper(): hashlib.new(name, content).hexdigest() for name in ("sha256", "sha512")})
    for template in sorted(HERE.rglob("*.in")):
        text = re.sub(r"@([A-Z0-9]+)@", lambda found: values[found.group(1)], template.read_text())
        target = folder / template.relative_to(HERE).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for place in ("conan/test_package", "conda"):
        (folder / place / "main.c").write_bytes(PROGRAM.read_bytes())


if __name__ == "__main__":
    main()
