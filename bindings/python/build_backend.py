# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel: the package and, if FLASHATTN_LIBRARY names it, libflashattn.so itself, stripped, with the extensions for PyTorch and
JAX where this interpreter has these and FLASHATTN_TORCH_EXTENSION or FLASHATTN_JAX_EXTENSION is not 0. A PEP 517 backend without dependencies, so that `pip wheel .` needs no
network; also a program:

    python3 build_backend.py LIBRARY FOLDER      # prints the name of the wheel
"""

import base64
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EPOCH = (1980, 1, 1, 0, 0, 0)  # equal input, equal wheel


def _project(key):
    found = re.search(rf'^{key} = "(.*)"$', (HERE / "pyproject.toml").read_text(), flags=re.M)
    assert found, f"pyproject.toml has no {key}"
    return found.group(1)


# vLLM and SGLang look for their plugins here.
ENTRY_POINTS = "[vllm.general_plugins]\nflashattn = flashattn.vllm:register\n\n[sglang.srt.plugins]\nflashattn = flashattn.sglang:register\n"
HEADER = "include/flashattn/flashattn.h"  # for flashattn.build_torch and build_jax


def _sources():
    """The files of the package, without the extensions, which flashattn.build_torch and build_jax put beside them."""
    return [path for path in sorted((HERE / "flashattn").iterdir()) if path.is_file() and path.suffix != ".so"]


def _header():
    """From the source tree, or from an sdist, which has it in the package."""
    for folder in (HERE / "flashattn", ROOT):
        if (folder / HEADER).is_file():
            return (folder / HEADER).read_bytes()
    raise SystemExit(f"build_backend.py: {HEADER} was not found")


def _metadata():
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {_project('name')}",
        f"Version: {_project('version')}",
        f"Summary: {_project('description')}",
        "License: Apache-2.0",
        f"Requires-Python: {_project('requires-python')}",
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + (HERE / "README.md").read_text()


MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file


def _machine(library):
    """The processor that the library is made for, which need not be this machine's."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise SystemExit("build_backend.py: the library is not an ELF file of 64 bits")
    number = int.from_bytes(library[18:20], "little")
    if number not in MACHINES:
        raise SystemExit(f"build_backend.py: no tag is known for processors of e_machine {number}")
    return MACHINES[number]


def _stripped(library):
    """The bytes of the library without symbols that only a debugger reads."""
    machine = _machine(Path(library).read_bytes())
    strip = shutil.which("strip" if machine == os.uname().machine else f"{machine}-linux-gnu-strip")
    if strip is None:
        return Path(library).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "library"
        shutil.copy(library, copy)
        subprocess.run([strip, "--strip-unneeded", copy], check=True)
        return copy.read_bytes()


def _extensions(machine):
    """Names and bytes of the extensions for PyTorch and JAX that can be built here, with a line that says why one cannot."""
    spec = importlib.util.spec_from_file_location("_build", HERE / "flashattn/_build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    for framework in ("torch", "jax"):
        if os.environ.get(f"FLASHATTN_{framework.upper()}_EXTENSION") == "0":
            continue
        try:
            if machine != os.uname().machine:
                raise build.Unavailable(f"it would have to be built on {machine}")
            with tempfile.TemporaryDirectory() as folder:
                yield build.name_of(framework), build.build(framework, Path(folder)).read_bytes()
        except build.Unavailable as missing:
            print(f"build_backend.py: the wheel has no extension for {framework}: {missing}", file=sys.stderr)


# The newest symbols of libstdc++ that a system of each manylinux tag has: (3, 4, n), as auditwheel's policies say.
NEWEST_GLIBCXX = [(24, (2, 28)), (28, (2, 31)), (29, (2, 34)), (30, (2, 35)), (33, (2, 39))]


def _platform_tag(*libraries):
    """manylinux of the oldest system that has the versions of glibc and libstdc++ that the libraries ask for."""
    needs = b"".join(libraries)
    versions = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", needs)}
    glibcxx = max(int(number) for number in re.findall(rb"GLIBCXX_3\.4\.(\d+)", needs) or [b"0"])
    systems = [system for number, system in NEWEST_GLIBCXX if number >= glibcxx]
    if not systems:
        raise SystemExit(f"build_backend.py: a library asks for GLIBCXX_3.4.{glibcxx}, which no manylinux tag is known to have")
    major, minor = max(versions | {systems[0]})
    return f"manylinux_{major}_{minor}_{_machine(libraries[0])}"


def _soname(library):
    found = re.search(rb"\0(libflashattn\.so\.\d+)\0", library)
    if not found:
        raise SystemExit("build_backend.py: the library has no SONAME like libflashattn.so.0")
    return found.group(1).decode()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name, version = _project("name"), _project("version")
    dist_info = f"{name}-{version}.dist-info"
    files = {f"flashattn/{path.name}": path.read_bytes() for path in _sources()}
    files[f"flashattn/{HEADER}"] = _header()
    tag = "py3-none-any"
    library = os.environ.get("FLASHATTN_LIBRARY")
    if library:
        content = _stripped(library)
        binaries = {_soname(content): content}
        binaries.update(_extensions(_machine(content)))
        files.update({f"flashattn/{binary}": content for binary, content in binaries.items()})
        tag = f"py3-none-{_platform_tag(*binaries.values())}"
    files[f"{dist_info}/METADATA"] = _metadata().encode()
    files[f"{dist_info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: libflashattn\nRoot-Is-Purelib: {'false' if library else 'true'}\nTag: {tag}\n".encode()
    )
    files[f"{dist_info}/entry_points.txt"] = ENTRY_POINTS.encode()
    if (ROOT / "LICENSE").exists():
        files[f"{dist_info}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = f"{dist_info}/RECORD"
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}\n")
    files[record] = ("".join(lines) + f"{record},,\n").encode()
    wheel = f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = (0o755 if ".so" in path else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    base = f"{_project('name')}-{_project('version')}"
    name = f"{base}.tar.gz"
    with tarfile.open(Path(sdist_directory) / name, "w:gz") as archive:
        for path in [*_sources(), *(HERE / n for n in ("build_backend.py", "pyproject.toml", "README.md"))]:
            archive.add(path, f"{base}/{path.relative_to(HERE)}")
        for path, content in ((f"flashattn/{HEADER}", _header()), ("PKG-INFO", _metadata().encode())):
            entry = tarfile.TarInfo(f"{base}/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return name


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: build_backend.py LIBRARY FOLDER")
    os.environ["FLASHATTN_LIBRARY"] = sys.argv[1]
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    print(build_wheel(sys.argv[2]))
