# SPDX-License-Identifier: Apache-2.0
"""The ctypes structs against a C compiler's view of the header.

FLASHATTN_LAYOUT is a program, generated from flashattn.h, that prints `struct size` and `struct.field offset size` lines.
"""

import ctypes
import os
import subprocess
import unittest

from flashattn import _abi


@unittest.skipUnless(os.environ.get("FLASHATTN_LAYOUT"), "FLASHATTN_LAYOUT is not set")
class LayoutTest(unittest.TestCase):
    def test_every_field(self):
        printed = subprocess.run([os.environ["FLASHATTN_LAYOUT"]], check=True, capture_output=True, text=True).stdout
        ours = []
        # The library makes the last two, and tells no size of them.
        for struct in (*_abi.STRUCTS.values(), _abi.fa_score_position, _abi.fa_score_aux):
            ours.append(f"{struct.__name__} {ctypes.sizeof(struct)}")
            for name, _ in struct._fields_:
                field = getattr(struct, name)
                ours.append(f"{struct.__name__}.{name} {field.offset} {field.size}")
        self.assertEqual(sorted(ours), sorted(printed.splitlines()))
        self.assertGreater(len(ours), 80)


if __name__ == "__main__":
    unittest.main()
