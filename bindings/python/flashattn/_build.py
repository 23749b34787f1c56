# SPDX-License-Identifier: Apache-2.0
"""Builds the package's extensions in C++, for build_torch.py, build_jax.py and the wheel. Imports nothing of the package, which needs the library."""

import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

HERE = Path(__file__).resolve().parent
_TORCH = (2, 10)  # the oldest PyTorch that its extension is for


class Unavailable(Exception):
    """The extension cannot be built here; the text says what is missing."""


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


def _package(name: str, framework: str) -> Path:
    """The folder of an installed package, without importing it, which may take seconds."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise Unavailable(f"{framework} is not installed")
    return Path(found.submodule_search_locations[0])


def name_of(framework: str) -> str:
    """The file of the extension for "torch" or "jax"."""
    return f"libflashattn_{framework}.so"


def build(framework: str, folder: Path) -> Path:
    """Builds the extension for "torch" or "jax" in `folder`.

    Raises Unavailable where something is missing, RuntimeError where the compiler fails.
    """
    if framework == "torch":
        torch = _package("torch", "PyTorch")
        version: Dict[str, Any] = {}
        exec((torch / "version.py").read_text(), version)
        major, minor = (int(part) for part in version["__version__"].split(".")[:2])
        if (major, minor) < _TORCH:
            raise Unavailable(f"PyTorch is {major}.{minor}; its stable ABI is used from {_TORCH[0]}.{_TORCH[1]} on")
        target = f"-DTORCH_TARGET_VERSION=0x{_TORCH[0]:02x}{_TORCH[1]:02x}000000000000"
        return _compile(
            folder, "torch", "torch_operators.cpp", torch / "include", [target], ["-L", str(torch / "lib"), "-ltorch_cpu"]
        )
    headers = _package("jaxlib", "JAX") / "include"
    if not (headers / "xla/ffi/api/ffi.h").is_file():
        raise Unavailable(f"JAX is too old: its package jaxlib has no {headers.name}/xla/ffi/api/ffi.h")
    return _compile(folder, "jax", "jax_handlers.cpp", headers)


def _compile(
    folder: Path, framework: str, source: str, headers: Path, options: Sequence[str] = (), libraries: Sequence[str] = ()
) -> Path:
    compiler, header = _compiler(), _header()
    name = name_of(framework)
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / name
    partial = folder / f"{name}.{os.getpid()}"  # so that nobody loads half a file
    # Texts of failures name source files; they shall not depend on where these lie.
    prefixes = ((headers, framework), (header, "include"), (HERE, "flashattn"))
    command = [
        *compiler,
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wl,-z,defs", "-Wl,-s"),
        *options,
        *(f"-ffile-prefix-map={path}={prefix}" for path, prefix in prefixes),
        *("-I", str(header), "-isystem", str(headers)),
        *(str(HERE / source), "-o", str(partial)),
        *libraries,
        f"-Wl,-soname,{name}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        os.replace(partial, result)
    finally:
        if partial.exists():
            partial.unlink()
    return result


def main(framework: str, arguments: List[str]) -> Optional[str]:
    """The program `python3 -m flashattn.build_<framework> [FOLDER]`; the result is for sys.exit()."""
    if len(arguments) > 1:
        return f"usage: python3 -m flashattn.build_{framework} [FOLDER]"
    try:
        print(build(framework, Path(arguments[0]) if arguments else HERE))
    except Unavailable as missing:
        return f"flashattn.build_{framework}: {missing}"
    return None
