# SPDX-License-Identifier: Apache-2.0
"""Builds the extension that runs the operators of flashattn.torch without Python: torch_operators.cpp, against PyTorch's stable ABI.

    python3 -m flashattn.build_torch            # beside the package, where flashattn.torch finds it
    python3 -m flashattn.build_torch FOLDER     # elsewhere: set FLASHATTN_TORCH_EXTENSION to the file

It needs a C++ compiler (CXX, else c++) and PyTorch 2.10 or newer. The file serves any version of Python, and PyTorch from 2.10 on.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

HERE = Path(__file__).resolve().parent
NAME = "libflashattn_torch.so"
_TARGET = (2, 10)  # the oldest PyTorch that the file is for


class Unavailable(Exception):
    """The extension cannot be built here; the text says what is missing."""


def _torch() -> Path:
    """The folder of an installed PyTorch whose stable ABI is new enough."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise Unavailable("PyTorch is not installed")
    folder = Path(found.submodule_search_locations[0])
    version: Dict[str, Any] = {}
    exec(
        (folder / "version.py").read_text(), version
    )  # without importing PyTorch, which takes seconds
    major, minor = (int(part) for part in version["__version__"].split(".")[:2])
    if (major, minor) < _TARGET:
        raise Unavailable(
            f"PyTorch is {major}.{minor}; its stable ABI is used from {_TARGET[0]}.{_TARGET[1]} on"
        )
    return folder


def _compiler() -> List[str]:
    command = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(command[0]) is None:
        raise Unavailable(f"the C++ compiler {command[0]} was not found; set CXX")
    return command


def _header() -> Path:
    """The include folder with flashattn/flashattn.h: in a wheel beside the package's modules, else in the source tree."""
    for folder in (HERE / "include", HERE.parents[2] / "include"):
        if (folder / "flashattn/flashattn.h").is_file():
            return folder
    raise Unavailable("flashattn/flashattn.h was not found")


def build(folder: Path) -> Path:
    """Builds the extension in `folder`. Raises Unavailable where something is missing, RuntimeError where the compiler fails."""
    torch, compiler, header = _torch(), _compiler(), _header()
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / NAME
    partial = folder / f"{NAME}.{os.getpid()}"  # so that nobody loads half a file
    command = [
        *compiler,
        *(
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            "-Wall",
            "-Wl,-z,defs",
            "-Wl,-s",
        ),
        f"-DTORCH_TARGET_VERSION=0x{_TARGET[0]:02x}{_TARGET[1]:02x}000000000000",
        # Texts of failures name source files; they shall not depend on where these lie.
        *(
            f"-ffile-prefix-map={path}={name}"
            for path, name in (
                (torch / "include", "torch"),
                (header, "include"),
                (HERE, "flashattn"),
            )
        ),
        *("-I", str(header), "-isystem", str(torch / "include")),
        str(HERE / "torch_operators.cpp"),
        *("-o", str(partial), "-L", str(torch / "lib"), "-ltorch_cpu"),
        f"-Wl,-soname,{NAME}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}"
            )
        os.replace(partial, result)
    finally:
        if partial.exists():
            partial.unlink()
    return result


def main(arguments: List[str]) -> Optional[str]:
    if len(arguments) > 1:
        return "usage: python3 -m flashattn.build_torch [FOLDER]"
    try:
        print(build(Path(arguments[0]) if arguments else HERE))
    except Unavailable as missing:
        return f"flashattn.build_torch: {missing}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
