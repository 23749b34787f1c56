#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_includes.py passes on src/ and fails once a violation is planted in a copy of it.

usage: check_includes_test.py SRC_DIR
"""
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

import check_includes

SRC = Path(sys.argv[1])

# File, line added to it, words of the problem that must be reported.
VIOLATIONS = [
    ("core/mask.h", '#include "cpu/simd.h"', "core may include"),
    ("cpu/simd.h", '#include "cuda/host/plan.h"', "cpu may include"),
    ("cpu/simd.h", "#include <cuda/host/plan.h>", "cpu may include"),
    ("api/api.cpp", '#include "cuda/host/plan.h"', "api may include"),
    ("cuda/common/ptx.cuh", '#include "cuda/kernels/decode/decode.h"', "cuda/common may include"),
    ("cuda/common/mma.cuh", '#include "cuda/host/plan.h"', "cuda/common may include"),
    ("cuda/kernels/decode/decode.h", '#include "cuda/kernels/fwd_sm80/forward.h"', "cuda/kernels/decode may include"),
    ("cuda/kernels/merge/merge.cu", '#include "cuda/host/plan.h"', "cuda/kernels/merge may include"),
    ("cuda/kernels/decode/instance.cu.in", '#include "cuda/kernels/fwd_sm90/forward.cuh"', "cuda/kernels/decode may include"),
    ("cuda/kernels/fwd_sm90/forward.cuh", '#include "cuda/kernels/fwd_sm80/forward.cuh"', "cuda/kernels/fwd_sm90 may include"),
    ("cuda/kernels/mla/cta.cuh", '#include "cuda/kernels/fwd_sm80/forward.h"', "cuda/kernels/mla may include"),
    ("cuda/kernels/a_new_kernel/kernel.cuh", '#include "cuda/kernels/decode/decode.h"', "cuda/kernels/a_new_kernel may include"),
    ("cuda/kernels/fwd_sm80/forward.cuh", "#include <cute/tensor.hpp>", "forbidden"),
    ("cuda/host/backend.cpp", "#  include <cublas_v2.h>", "forbidden"),
    ("a_new_folder/file.h", "", "no rule"),
]


class Planted(unittest.TestCase):
    def test_clean(self):
        files, problems = check_includes.check(SRC)
        self.assertEqual(problems, [])
        self.assertGreater(files, 100)

    def test_violations(self):
        for path, line, words in VIOLATIONS:
            with self.subTest(file=path, line=line), tempfile.TemporaryDirectory() as folder:
                root = Path(folder) / "src"
                shutil.copytree(SRC, root)
                file = root / path
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a") as out:
                    out.write(line + "\n")
                _, problems = check_includes.check(root)
                self.assertEqual(len(problems), 1, problems)
                self.assertIn(path, problems[0])
                self.assertIn(words, problems[0])

    def test_every_planted_file_is_there(self):
        missing = [path for path, _, _ in VIOLATIONS if "a_new_" not in path and not (SRC / path).is_file()]
        self.assertEqual(missing, [], "a violation is planted in a file that no longer exists")

    def test_exception_that_nobody_needs(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "src"
            shutil.copytree(SRC, root)
            for file in (root / "cuda/kernels/bwd_simt").iterdir():
                file.write_text(file.read_text().replace('#include "cuda/kernels/fwd_simt/', "// "))
            _, problems = check_includes.check(root)
            self.assertEqual(len(problems), 1, problems)
            self.assertIn("fwd_simt/]: no file needs it", problems[0])

    def test_empty_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            files, problems = check_includes.check(Path(folder))
            self.assertEqual(files, 0)
            self.assertTrue(any("no source files" in problem for problem in problems))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
