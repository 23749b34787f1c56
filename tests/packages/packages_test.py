#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes each package as a release would, installs it from its file in an empty environment, and runs a program there. Prints size and time.
Exits 77 (skipped), with the reason, where a tool is missing.

usage: packages_test.py CASE SOURCE_DIR CMAKE GENERATOR [LIBRARY]
"""
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

case, source, cmake, generator = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:5]
library = Path(sys.argv[5]) if len(sys.argv) > 5 else None
VERSION = re.search(r"\n  VERSION (\S+)", (source / "CMakeLists.txt").read_text()).group(1)
MB = 1000 * 1000


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


def need(tool, package):
    found = shutil.which(tool)
    return found or skip(f"no {tool} ({package})")


def run(*command, cwd=None, **environment):
    """In an environment without a trace of this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHATTN", "PYTHON", "LD_"))}
    print("+", " ".join(map(str, command)), flush=True)
    result = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
                            env={**kept, **environment})
    if result.returncode != 0:
        print(result.stdout)
        raise SystemExit(f"{command[0]} failed with {result.returncode}")
    return result.stdout


@contextlib.contextmanager
def timed(what):
    begin = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begin:.1f} s", flush=True)


def archive_of_sources(folder):
    """What a release would publish: the sources without build trees."""
    archive = folder / f"libflashattn-{VERSION}.tar.gz"
    parts = ["CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md", "bindings", "docs", "include", "src", "tests"]
    with tarfile.open(archive, "w:gz") as tar:
        for part in parts:
            tar.add(source / part, f"libflashattn-{VERSION}/{part}",
                    filter=lambda entry: None if entry.name.endswith(("__pycache__", "/target")) else entry)
    print(f"{archive.name}: {archive.stat().st_size / MB:.2f} MB")
    return archive


def recipes(folder):
    archive = archive_of_sources(folder)
    run(sys.executable, source / "bindings/packages/recipes.py", archive.as_uri(), archive, folder / "recipes")
    return folder / "recipes"


def make_wheel(folder, machine):
    # Without the extension for PyTorch, whose needs are those of the compiler that builds it.
    name = run(sys.executable, source / "bindings/python/build_backend.py", library, folder, FLASHATTN_TORCH_EXTENSION="0", FLASHATTN_JAX_EXTENSION="0").strip()
    assert name == f"flashattn-{VERSION}-py3-none-manylinux_2_28_{machine}.whl", name
    wheel = folder / name
    with_cuda = b"backends=cpu cuda" in library.read_bytes()  # fa_build_info()
    limit = 30 * MB if with_cuda else 3 * MB
    size = wheel.stat().st_size
    print(f"{name}: {size / MB:.2f} MB {'with' if with_cuda else 'without'} CUDA")
    assert size <= limit, f"{size} bytes; the limit is {limit}"
    auditwheel = shutil.which("auditwheel")
    if auditwheel:
        said = " ".join(run(auditwheel, "show", wheel).split())
        tag = re.search(rf'platform tag: "manylinux_2_(\d+)_{machine}"', said)
        assert tag and int(tag.group(1)) <= 28, said
        print(tag.group(0))
    else:
        print("auditwheel is not installed: the tag is what build_backend.py computed")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "unpacked")
    return wheel


def test_wheel(folder):
    wheel = make_wheel(folder, "x86_64")
    example = source / "bindings/python/examples/causal.py"
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        run(sys.executable, "-m", "venv", folder / "empty")
        python = folder / "empty/bin/python"
        with timed("pip install"):
            run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", wheel)
        assert "kernel cpu_" in run(python, example, cwd="/")
    else:
        print("this interpreter makes no environments with pip: the wheel is unpacked instead")
    assert "kernel cpu_" in run(sys.executable, example, cwd="/", PYTHONPATH=str(folder / "unpacked"))


def test_wheel_aarch64(folder):
    """On the library that tests/arm has built. The program runs under qemu-user, with the wheel's library."""
    compiler = need("aarch64-linux-gnu-gcc", "Debian package g++-aarch64-linux-gnu")
    qemu = need("qemu-aarch64", "Debian package qemu-user")
    if not library.exists():
        skip(f"{library} was not built: the test arm.build was skipped")
    make_wheel(folder, "aarch64")
    carried = next((folder / "unpacked/flashattn").glob("libflashattn.so.*"))
    run(compiler, "-std=c99", "-I", source / "include", "-I", library.parent / "include", source / "tests/install/main.c", carried, "-o",
        folder / "user", "-Wl,-rpath," + str(carried.parent))
    print(run(qemu, "-L", "/usr/aarch64-linux-gnu", folder / "user"))


def test_mingw(folder):
    need("x86_64-w64-mingw32-g++-posix", "Debian package g++-mingw-w64-x86-64-posix")
    tree = folder / "tree"
    with timed("build for Windows"):
        run(cmake, "--preset", "mingw", "-G", generator, "-B", tree, f"-DCMAKE_RUNTIME_OUTPUT_DIRECTORY={tree}/bin", cwd=source)
        run(cmake, "--build", tree, "--parallel", os.cpu_count())
    dll = tree / "bin/libflashattn-0.dll"
    tables = run("x86_64-w64-mingw32-objdump", "-p", dll)
    exported = set(re.findall(r"^\s*\[ *\d+\].* (\S+)$", tables[tables.index("[Ordinal/Name Pointer] Table"):], flags=re.M))
    wanted = set(re.findall(r"^fa_\w+", (source / "src/api/symbols.txt").read_text(), flags=re.M))
    assert exported == wanted, f"exported but not listed: {exported - wanted}, listed but not exported: {wanted - exported}"
    foreign = set(re.findall(r"DLL Name: (\S+)", tables)) - {"ADVAPI32.dll", "KERNEL32.dll", "msvcrt.dll"}
    assert not foreign, f"the DLL needs {foreign}, which Windows does not have"
    run("x86_64-w64-mingw32-strip", "-o", folder / "stripped.dll", dll)
    print(f"{dll.name}: {(folder / 'stripped.dll').stat().st_size / MB:.2f} MB stripped")
    run(cmake, "--install", tree, "--prefix", folder / "installed")
    for file in ("bin/libflashattn-0.dll", "lib/libflashattn.dll.a", "include/flashattn/flashattn.h"):
        assert (folder / "installed" / file).exists(), file
    wine = next((tool for tool in ("wine64", "wine", "/usr/lib/wine/wine64") if shutil.which(tool)), None)
    if wine is None:
        print("wine is not installed: the programs were built and not run")
        return
    settings = {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
    programs = [("fa_minimal",), ("fa_cache",), ("fa_rollout", "--device", "cpu"), ("fa_cascade",), ("fa_score",), ("fa_engine", "--device", "cpu"),
                ("fa_demo", "--steps", "20", "--compare", "20", "--width", "64", "--seqlen", "64", "--max-n", "512")]
    for program, *arguments in programs:
        print(run(wine, tree / f"bin/{program}.exe", *arguments, **settings).splitlines()[-1])
    plugin = next(tree.rglob("fa_plugin.dll"))
    assert "attention by libflashattn" in run(wine, tree / "bin/fa_plugin_host.exe", plugin, dll, **settings)
    assert "attention by plain C" in run(wine, tree / "bin/fa_plugin_host.exe", plugin, "missing.dll", **settings)


def test_conan(folder):
    conan = need("conan", "PyPI package conan, version 2")
    recipe = recipes(folder) / "conan"
    home = {"CONAN_HOME": str(folder / "conan_home")}
    run(conan, "profile", "detect", **home)
    with timed("conan create"):
        said = run(conan, "create", recipe, "--no-remote", **home)
    assert f"flashattn {VERSION}: 2.5 25" in said, said


def test_vcpkg(folder):
    """The port itself, run by CMake. vcpkg_stand_ins.cmake has the functions of vcpkg that it calls, because no registry has the tool."""
    port = recipes(folder) / "vcpkg"
    with timed("port"):
        run(cmake, f"-DPORT_DIR={port}", f"-DWORK_DIR={folder / 'work'}", f"-DGENERATOR={generator}", "-P",
            source / "tests/packages/vcpkg_stand_ins.cmake")
    prefix = folder / "work/packages"
    run(cmake, "-G", generator, "-S", source / "tests/install/find_package", "-B", folder / "user", f"-DCMAKE_PREFIX_PATH={prefix}")
    run(cmake, "--build", folder / "user")
    print(run(folder / "user/user"))


def test_conda(folder):
    """Rendered with the parser of rattler-build, with and without CUDA. Building needs conda-forge's compilers."""
    if importlib.util.find_spec("rattler_build") is None:
        skip("no rattler_build (PyPI package py-rattler-build)")
    import rattler_build

    recipe = rattler_build.Stage0Recipe.from_file(str(recipes(folder) / "conda/recipe.yaml"))
    variants = {"cuda_compiler_version": ["None", "13.0"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}
    rendered = [variant.recipe.to_dict() for variant in recipe.render(rattler_build.VariantConfig(variants))]
    named = sorted((r["package"]["name"], "cuda" in str(r["requirements"])) for r in rendered)
    assert {("libflashattn", True), ("libflashattn", False)} <= set(named) and any(name == "python-flashattn" for name, _ in named), named
    assert all(r["package"]["version"] == VERSION for r in rendered)


def test_homebrew(folder):
    ruby = need("ruby", "Debian package ruby")
    assert "Syntax OK" in run(ruby, "-c", recipes(folder) / "homebrew/flashattn.rb")


with tempfile.TemporaryDirectory() as scratch:
    {name[5:]: function for name, function in list(globals().items()) if name.startswith("test_")}[case](Path(scratch))
