#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_drift.py must notice every kind of drift: one is put into a copy of the bindings at a time.

usage: test_check_drift.py HEADER BINDINGS_DIR LAYOUT_PROGRAM
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

header, bindings, program = sys.argv[1:]
FILES = ["python/flashattn/_abi.py", "rust/flashattn-sys/src/lib.rs", "julia/src/LibFlashattn.jl"]
PYTHON, RUST, JULIA = FILES
DRIFTS = [
    (PYTHON, '("softcap", c_float)', '("softcap", c_double)'),
    (PYTHON, '        ("num_splits", c_int32),\n', ""),
    (PYTHON, "MASK_CAUSAL, MASK_CAUSAL_TOP_LEFT = 0, 1, 2", "MASK_CAUSAL, MASK_CAUSAL_TOP_LEFT = 0, 2, 1"),
    (PYTHON, '"fa_merge": (', '"fa_fuse": ('),
    (RUST, "stride: [i64; 4]", "stride: [i64; 5]"),
    (RUST, "        window: u32,\n        window_left: i64,\n", "        window_left: i64,\n        window: u32,\n"),
    (RUST, "FA_ERROR_BUSY: fa_status = 106", "FA_ERROR_BUSY: fa_status = 107"),
    (RUST, "    pub fn fa_destroy(ctx: fa_context);\n", ""),
    (JULIA, "kernel::NTuple{64,UInt8}", "kernel::NTuple{63,UInt8}"),
    (JULIA, "    dq::fa_tensor\n", "    dq::Ptr{Cvoid}\n"),
    (JULIA, "const FA_BFLOAT16 = Int32(0x00011004)\n", ""),
    (JULIA, "    :fa_forward,\n", ""),
]

missed = 0
for file, before, after in DRIFTS:
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(bindings) / name, Path(folder) / name)
        text = (Path(folder) / file).read_text()
        if before not in text:
            print(f"{file} no longer has {before!r}: this test needs another drift")
            missed += 1
            continue
        (Path(folder) / file).write_text(text.replace(before, after, 1))
        check = Path(bindings) / "check_drift.py"
        result = subprocess.run([sys.executable, check, header, folder, program], capture_output=True, text=True)
        if result.returncode == 0 or file not in result.stdout:
            print(f"{file}: {before!r} -> {after!r} went unnoticed\n{result.stdout}{result.stderr}")
            missed += 1
print(f"{len(DRIFTS)} drifts, {missed} unnoticed")
sys.exit(1 if missed else 0)
