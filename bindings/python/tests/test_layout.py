# SPDX-License-Identifier: Apache-2.0
"""The ctypes structs against a C compiler's view of the headers.

FLASHATTN_LAYOUT and FLASHATTN_DIST_LAYOUT are programs, generated from flashattn.h and flashattn_dist.h, that print `struct size` and `struct.field offset size` lines.
"""

import ctypes
import os
import subprocess
import unittest

from flashattn import _abi, _abi_dist


class LayoutTest(unittest.TestCase):
    def compare(self, variable, structs):
        if not os.environ.get(variable):
            self.skipTest(f"{variable} is not set")
        printed = subprocess.run([os.environ[variable]], check=True, capture_output=True, text=True).stdout
        ours = []
        for struct in structs:
            ours.append(f"{struct.__name__} {ctypes.sizeof(struct)}")
            for name, _ in struct._fields_:
                field = getattr(struct, name)
                ours.append(f"{struct.__name__}.{name} {field.offset} {field.size}")
        self.assertEqual(sorted(ours), sorted(printed.splitlines()))
        return len(ours)

    def test_every_field(self):
        # The library makes the last two, and tells no size of them.
        structs = (*_abi.STRUCTS.values(), _abi.fa_score_position, _abi.fa_score_aux)
        self.assertGreater(self.compare("FLASHATTN_LAYOUT", structs), 80)

    def test_every_field_of_context_parallelism(self):
        self.assertGreater(self.compare("FLASHATTN_DIST_LAYOUT", _abi_dist.STRUCTS), 60)


if __name__ == "__main__":
    unittest.main()
