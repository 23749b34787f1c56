#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes link-time stand-ins for libc, libm, libstdc++ and libgcc_s that offer only what an older Linux has.

A wheel tagged manylinux_2_28 must run with glibc 2.28, but a linker binds every symbol to the newest version that the libraries of the build
machine offer. A stand-in has the same SONAME and, of every symbol, the newest version that the policy permits. It holds no code and is used
by the linker alone. A symbol that the policy does not know is missing there, so that the link fails instead of the user's machine.

usage: manylinux_stubs.py CXX_COMPILER POLICY FOLDER      # POLICY: 2_28
"""
import collections
import re
import subprocess
import sys
from pathlib import Path

# The newest versions of each policy, as PEP 600 and auditwheel have them.
POLICIES = {"2_28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}}
LIBRARIES = ["libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"]
# Functions of <sys/stat.h> that are symbols since glibc 2.33 alone. Before, each program had these wrappers from libc_nonshared.a; the functions
# behind them have stayed in every libc. The number is the version of struct stat, 1 on x86-64 and 0 on Arm.
STAT = """#include <sys/stat.h>
#if defined(__x86_64__)
enum { kVersion = 1 };
#else
enum { kVersion = 0 };
#endif
int __xstat(int version, const char *path, struct stat *found);
int __lxstat(int version, const char *path, struct stat *found);
int __fxstat(int version, int descriptor, struct stat *found);
int __fxstatat(int version, int directory, const char *path, struct stat *found, int flags);
int stat(const char *path, struct stat *found) { return __xstat(kVersion, path, found); }
int lstat(const char *path, struct stat *found) { return __lxstat(kVersion, path, found); }
int fstat(int descriptor, struct stat *found) { return __fxstat(kVersion, descriptor, found); }
int fstatat(int directory, const char *path, struct stat *found, int flags) { return __fxstatat(kVersion, directory, path, found, flags); }
"""
# Part of libc since glibc 2.34. Older ones look for the functions here, and newer ones still have files of these names.
FORMERLY_SEPARATE = ["libpthread.so.0", "libdl.so.2", "librt.so.1"]


def output(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def permitted(version, policy):
    family, _, number = version.partition("_")
    if not re.fullmatch(r"[\d.]+", number):
        return None  # GLIBC_PRIVATE, CXXABI_TM_1 and the like
    parsed = tuple(int(part) for part in number.split("."))
    return parsed if family in policy and parsed <= policy[family] else None


def exported(library, policy):
    """{symbol: (version, type)}: the newest permitted version of each."""
    newest = {}
    pattern = re.compile(r"^\s*\d+:\s+[0-9a-f]+\s+\S+\s+(\w+)\s+(GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+(\S+)\s+([^@\s]+)@@?(\S+)")
    for line in output("readelf", "--dyn-syms", "--wide", library).splitlines():
        found = pattern.match(line)
        if not found or found.group(3) == "UND":
            continue
        kind, _, _, symbol, version = found.groups()
        number = permitted(version, policy)
        if kind in {"FUNC", "IFUNC", "OBJECT", "TLS"} and number and (symbol not in newest or number > newest[symbol][0]):
            newest[symbol] = (number, version, kind)
    return {symbol: (version, kind) for symbol, (_, version, kind) in newest.items()}


def dynamic_linker(libc):
    """The SONAME of the dynamic linker, which libc.so.6 needs and which has symbols of its own, such as __tls_get_addr."""
    return re.search(r"NEEDED.*\[(ld[^\]]*)\]", output("readelf", "--dynamic", "--wide", libc)).group(1)


def write_stub(compiler, soname, symbols, folder, name=None):
    assembly, versions = [".text"], collections.defaultdict(list)
    for index, (symbol, (version, kind)) in enumerate(sorted(symbols.items())):
        section, type_name = {"OBJECT": (".data", "object"), "TLS": ('.section .tdata,"awT"', "tls_object")}.get(kind, (".text", "function"))
        stub = f"stub_{index}"
        assembly += [section, f".globl {stub}", f".type {stub}, %{type_name}", f"{stub}: .quad 0", f".size {stub}, 8"]
        assembly += [f".symver {stub}, {symbol}@@{version}"]
        versions[version].append(symbol)
    name = name or soname.split(".so")[0]
    source, script = folder / f"{name}.s", folder / f"{name}.map"
    source.write_text("\n".join(assembly) + '\n.section .note.GNU-stack,"",%progbits\n')
    nodes = [f"{version} {{ global: {'; '.join(names)}; }};" for version, names in sorted(versions.items())]
    script.write_text("\n".join(nodes) + "\nSTUB_LOCAL { local: stub_*; };\n" if nodes else "{ local: *; };\n")
    command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}", "-o", folder / f"{name}.so", source]
    output(*command)


def main():
    if len(sys.argv) != 4 or sys.argv[2] not in POLICIES:
        raise SystemExit(f"usage: manylinux_stubs.py CXX_COMPILER {'|'.join(POLICIES)} FOLDER")
    compiler, policy, folder = sys.argv[1], POLICIES[sys.argv[2]], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)

    def find(soname):
        path = output(compiler, f"-print-file-name={soname}").strip()
        if path == soname:
            raise SystemExit(f"manylinux_stubs.py: {compiler} does not find {soname}")
        return path

    linker = dynamic_linker(find("libc.so.6"))
    for soname in [*LIBRARIES, linker]:
        path = find(soname)
        symbols = exported(path, policy)
        if not symbols:
            raise SystemExit(f"manylinux_stubs.py: {path} has no symbol that the policy permits")
        write_stub(compiler, soname, symbols, folder, "libld" if soname == linker else None)
    (folder / "stat.c").write_text(STAT)
    output(compiler, "-x", "c", "-c", "-O2", "-fPIC", "-fvisibility=hidden", "-o", folder / "stat.o", folder / "stat.c")
    for soname in FORMERLY_SEPARATE:
        write_stub(compiler, soname, {}, folder)


if __name__ == "__main__":
    main()
