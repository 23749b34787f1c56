#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every binding that writes the C interface down again says what flashattn.h says: constants, functions, and the layout of every struct as
the C compiler has it. Reads sources only, so it needs no other language's tools. (C++ and Go include the header itself.)

usage: check_drift.py HEADER BINDINGS_DIR LAYOUT_PROGRAM
"""
import re
import subprocess
import sys
from pathlib import Path

# Size of each language's names for the types of fields. Alignment is the size; pointers and functions are PTR.
PTR = 8
SIZES = {
    "python": {"c_uint32": 4, "c_int32": 4, "c_int64": 8, "c_uint64": 8, "c_float": 4, "c_double": 8, "c_void_p": PTR, "c_char_p": PTR, "c_char": 1,
               "PARALLEL_FOR_FN": PTR, "LOG_FN": PTR},
    "rust": {"u32": 4, "i32": 4, "i64": 8, "u64": 8, "f32": 4, "f64": 8, "c_char": 1},
    "julia": {"UInt32": 4, "Int32": 4, "Int64": 8, "UInt64": 8, "Float32": 4, "Float64": 8, "UInt8": 1},
}


def python_structs(text):
    for name, body in re.findall(r"^class (fa_\w+)\(ctypes\.Structure\):\s+_fields_ = \[(.*?)^    \]", text, flags=re.S | re.M):
        yield name, [(field, *cut(kind, r"(\w+) \* (\d+)")) for field, kind in re.findall(r'\("(\w+)", ([^)]*)\)', body)]


def rust_structs(text):
    block = re.search(r"^abi_structs! \{\n(.*?)^\}", text, flags=re.S | re.M)
    for name, body in re.findall(r"^    (fa_\w+) \{\n(.*?)^    \}", block.group(1) if block else "", flags=re.S | re.M):
        yield name, [(field, *cut(kind, r"\[(.*); (\d+)\]")) for field, kind in re.findall(r"^\s+(\w+): (.*),$", body, flags=re.M)]


def julia_structs(text):
    for name, body in re.findall(r"^(?:mutable )?struct (fa_\w+)\n(.*?)^end", text, flags=re.S | re.M):
        fields = re.findall(r"^    (\w+)::(.*)$", body, flags=re.M)
        yield name, [(field, *reversed_cut(kind)) for field, kind in fields]


def cut(kind, array):
    """The type of an element and how many there are."""
    found = re.fullmatch(array, kind)
    return (found.group(1), int(found.group(2))) if found else (kind, 1)


def reversed_cut(kind):
    found = re.fullmatch(r"NTuple\{(\d+),(.*)\}", kind)
    return (found.group(2), int(found.group(1))) if found else (kind, 1)


def layout(structs, sizes):
    """The lines of LAYOUT_PROGRAM for structs as a language declares them."""
    lines, known = [], {}  # name -> (size, alignment)

    def measure(kind):
        if kind in known:
            return known[kind]
        if kind in sizes:
            return sizes[kind], sizes[kind]
        if re.match(r"\*(mut|const) |Ptr\{", kind) or kind.endswith("_fn"):
            return PTR, PTR
        if re.fullmatch(r"fa_\w+", kind):  # Rust's aliases of int32_t
            return 4, 4
        raise ValueError(f"unknown type {kind}")

    # Tensors first: the others hold them.
    for name, fields in sorted(structs, key=lambda s: s[0] != "fa_tensor"):
        offset = widest = 0
        for field, kind, count in fields:
            size, alignment = measure(kind)
            offset = (offset + alignment - 1) // alignment * alignment
            lines.append(f"{name}.{field} {offset} {size * count}")
            offset += size * count
            widest = max(widest, alignment)
        known[name] = ((offset + widest - 1) // widest * widest, widest)
        lines.append(f"{name} {known[name][0]}")
    return lines


def main():
    header, bindings, program = sys.argv[1:]
    code = re.sub(r"/\*.*?\*/", "", Path(header).read_text(), flags=re.S)
    constants = {name: int(value, 0) for name, value in re.findall(r"^\s+(FA_\w+)\s*=\s*(\w+)", code, flags=re.M)}
    functions = set(re.findall(r"^FA_API\b[^;]*?\b(fa_\w+)\s*\(", code, flags=re.M))
    expected = set(subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines())
    number = r"(0x[0-9A-Fa-f_]+|\d+)"
    languages = {
        # file, structs, constants (name, value), functions, whether constants must be complete
        "python": ("python/flashattn/_abi.py", python_structs, None, r'^        "(fa_\w+)": \(', False),
        "rust": ("rust/flashattn-sys/src/lib.rs", rust_structs, rf"^pub const (FA_\w+): \w+ = {number};", r"^    pub fn (fa_\w+)\(", True),
        "julia": ("julia/src/LibFlashattn.jl", julia_structs, rf"^const (FA_\w+) = U?Int32\({number}\)", r"^    :(fa_\w+),", True),
    }
    problems, counted = [], []
    for language, (file, read_structs, constant, function, complete) in languages.items():
        text = (Path(bindings) / file).read_text()
        # Python's module lists what it uses, without the prefix, some of it as one assignment of many.
        if constant is None:
            found = {}
            for names, values in re.findall(r"^([A-Z][A-Z0-9_]*(?:, [A-Z][A-Z0-9_]*)*) = ((?:0x)?[0-9A-Fa-f]+(?:, \d+)*)$", text, flags=re.M):
                found.update(zip(("FA_" + name for name in names.split(", ")), (int(value, 0) for value in values.split(", "))))
        else:
            found = {name: int(value, 0) for name, value in re.findall(constant, text, flags=re.M)}
        for name, value in found.items():
            if constants.get(name) != value:
                problems.append(f"{file}: {name} is {value:#x}; flashattn.h says {constants.get(name)}")
        if complete:
            problems += [f"{file}: {name} is missing" for name in sorted(set(constants) - set(found))]
        named = set(re.findall(function, text, flags=re.M))
        problems += [f"{file}: function {name} is not the same set as the header's" for name in sorted(named ^ functions)]
        lines = set(layout(list(read_structs(text)), SIZES[language]))
        problems += [f"{file}: {line} (offset, size) is not the header's" for line in sorted(lines - expected)]
        problems += [f"{file}: lacks {line} (offset, size)" for line in sorted(expected - lines)]
        counted.append(f"{language}: {len(found)} constants, {len(named)} functions, {len(lines)} structs and fields")
        if not found or not named or not lines:
            problems.append(f"{file}: nothing found; this check no longer understands it")
    print("\n".join(problems))
    print("; ".join(counted), f"- {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
