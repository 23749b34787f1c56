#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the build, moves the installed tree elsewhere, and uses it from outside: CMake package, pkg-config, dlopen; and the source tree by
add_subdirectory.

usage: install_test.py CASE SOURCE_DIR BUILD_DIR CMAKE GENERATOR C_COMPILER CXX_COMPILER [FLAGS]
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

case, source, build, cmake, generator, cc, cxx = sys.argv[1:8]
flags = sys.argv[8].split() if len(sys.argv) > 8 else []
here = Path(source) / "tests/install"


def run(*command, **environment):
    command = [str(part) for part in command]
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, check=True, env={**os.environ, **environment})


def configure_build_run(project, folder, *definitions):
    run(cmake, "-G", generator, "-S", here / project, "-B", folder, f"-DCMAKE_C_COMPILER={cc}", f"-DCMAKE_CXX_COMPILER={cxx}",
        f"-DCMAKE_C_FLAGS={' '.join(flags)}", f"-DCMAKE_CXX_FLAGS={' '.join(flags)}", *definitions)
    run(cmake, "--build", folder, "--parallel", os.cpu_count())
    run(folder / "user")


def installed(folder):
    """The installed tree, moved after the installation."""
    run(cmake, "--install", build, "--prefix", folder / "first")
    prefix = folder / "moved elsewhere"
    (folder / "first").rename(prefix)
    return prefix


def library_dir(prefix):
    return next(prefix.rglob("libflashattn.so")).parent


def test_find_package(folder):
    configure_build_run("find_package", folder / "build", f"-DCMAKE_PREFIX_PATH={installed(folder)}")


def test_pkg_config(folder):
    prefix = installed(folder)
    libraries = library_dir(prefix)
    asked = subprocess.run(["pkg-config", "--cflags", "--libs", "flashattn"], check=True, capture_output=True, text=True,
                           env={**os.environ, "PKG_CONFIG_PATH": str(libraries / "pkgconfig")}).stdout
    # pkg-config escapes blanks for a shell, so a shell reads them.
    program = folder / "user"
    run("sh", "-c", f"'{cc}' {' '.join(flags)} '{here / 'main.c'}' -o '{program}' {asked}")
    run(program, LD_LIBRARY_PATH=str(libraries))
    run("sh", "-c", f"'{cxx}' -std=c++17 {' '.join(flags)} '{source}/bindings/cpp/causal.cpp' -o '{program}' {asked}")
    run(program, LD_LIBRARY_PATH=str(libraries))
    version = subprocess.run(["pkg-config", "--modversion", "flashattn"], check=True, capture_output=True, text=True,
                             env={**os.environ, "PKG_CONFIG_PATH": str(libraries / "pkgconfig")}).stdout.strip()
    header = next(prefix.rglob("version.h")).read_text()
    assert f'"{version}"' in header, version


def test_dlopen(folder):
    prefix = installed(folder)
    program = folder / "user"
    run(cc, *flags, "-std=c99", "-I", prefix / "include", here / "dlopen.c", "-o", program, "-ldl")
    run(program, LD_LIBRARY_PATH=str(library_dir(prefix)))


def test_subdirectory(folder):
    # Unoptimised: this compiles the library a second time.
    configure_build_run("subdirectory", folder / "build", f"-DFLASHATTN_SOURCE_DIR={source}", "-DCMAKE_BUILD_TYPE=Debug")


def test_components(folder):
    run(cmake, "--install", build, "--prefix", folder / "runtime", "--component", "runtime")
    run(cmake, "--install", build, "--prefix", folder / "development", "--component", "development")
    names = {part: {file.name for file in (folder / part).rglob("*") if not file.is_dir()} for part in ("runtime", "development")}
    assert len(names["runtime"]) == 2 and all(re.fullmatch(r"libflashattn\.so\.[\d.]+", name) for name in names["runtime"]), names
    wanted = {"libflashattn.so", "flashattn.h", "flashattn.hpp", "flashattn_dist.h", "flashattn_dl.h", "version.h", "flashattn.pc", "flashattn-config.cmake"}
    assert wanted <= names["development"], names
    assert not names["runtime"] & names["development"], names
    for file in (folder / "development").rglob("*"):
        if file.is_file() and file.suffix in {".cmake", ".pc", ".h", ".hpp"}:
            for path in (source, build, str(folder)):
                assert path not in file.read_text(), f"{file} holds the absolute path {path}"


def test_cli(folder):
    run(cmake, "--install", build, "--prefix", folder / "tools", "--component", "tools")
    files = sorted(str(file.relative_to(folder / "tools")) for file in (folder / "tools").rglob("*") if file.is_file())
    assert [file for file in files if "_onnx" not in file] == ["bin/flashattn", "share/man/man1/flashattn.1"], files
    # Beside the library, wherever the tree lies, without an environment variable.
    prefix = installed(folder)
    run(prefix / "bin/flashattn", "verify", "--device", "cpu", "--quiet", "--filter", "forward fp32", LD_LIBRARY_PATH="")
    tool = (prefix / "bin/flashattn").read_bytes()
    assert build.encode() not in tool, "the tool holds the path of the build tree"


def test_onnxruntime(folder):
    """The custom operator finds the library beside it, wherever the tree lies; ONNX Runtime itself is not needed to load it."""
    operator, = installed(folder).rglob("libflashattn_onnx.so")
    run(sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(operator)!r}).RegisterCustomOps", LD_LIBRARY_PATH="")
    assert build.encode() not in operator.read_bytes(), "the operator holds the path of the build tree"


def packed(folder, generator):
    """What cpack makes of the build tree."""
    cpack = Path(cmake).parent / "cpack"
    run(cpack, "-G", generator, "-B", folder / "packages", "--config", Path(build) / "CPackConfig.cmake")
    return sorted(file for file in (folder / "packages").iterdir() if file.is_file())


def check_soname(libraries):
    """The names by which the linker and the loader ask: links to one file, which carries the middle one."""
    real = (libraries / "libflashattn.so").resolve()
    soname = re.search(r"SONAME.*\[(.*)\]", subprocess.run(["readelf", "-d", real], check=True, capture_output=True, text=True).stdout)
    assert re.fullmatch(r"libflashattn\.so\.\d+", soname.group(1)), soname
    assert (libraries / soname.group(1)).resolve() == real and real.name.startswith(soname.group(1) + "."), real
    return soname.group(1)


def test_tarball(folder):
    archive, = packed(folder, "TGZ")
    assert re.fullmatch(r"libflashattn-[\d.]+-Linux-\w+\.tar\.gz", archive.name), archive
    (folder / "unpacked").mkdir()
    run("tar", "-xzf", archive, "-C", folder / "unpacked")
    prefix = library_dir(folder / "unpacked").parent
    check_soname(prefix / "lib")
    configure_build_run("find_package", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")


def test_debian(folder):
    packages = {}
    for file in packed(folder, "DEB"):
        field = lambda name: subprocess.run(["dpkg-deb", "--field", file, name], check=True, capture_output=True, text=True).stdout.strip()
        packages[field("Package")] = {name: field(name) for name in ("Version", "Architecture", "Depends", "Section")}
        control = subprocess.run(["dpkg-deb", "--info", file], check=True, capture_output=True, text=True).stdout
        packages[field("Package")]["control"] = control
        run("dpkg-deb", "--extract", file, folder / "root")
    prefix = folder / "root/usr"
    soname = check_soname(library_dir(prefix))
    runtime = soname.replace(".so.", "")
    version = packages[runtime]["Version"]
    assert {runtime, "libflashattn-dev"} <= set(packages), packages
    assert packages["libflashattn-dev"]["Depends"] == f"{runtime} (= {version})", packages
    assert "shlibs" in packages[runtime]["control"] and "postinst" in packages[runtime]["control"], packages[runtime]["control"]
    if shutil.which("dpkg-shlibdeps"):
        assert re.search(r"libc6 \(>= [\d.]+\)", packages[runtime]["Depends"]), packages
    if "flashattn-tools" in packages:
        assert f"{runtime} (>= {version})" in packages["flashattn-tools"]["Depends"], packages
        run(prefix / "bin/flashattn", "--version")
    configure_build_run("find_package", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")


with tempfile.TemporaryDirectory() as scratch:
    {name[5:]: function for name, function in list(globals().items()) if name.startswith("test_")}[case](Path(scratch))
