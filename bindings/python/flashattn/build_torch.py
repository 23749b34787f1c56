# SPDX-License-Identifier: Apache-2.0
"""Builds the extension that runs the operators of flashattn.torch without Python: torch_operators.cpp, against PyTorch's stable ABI.

    python3 -m flashattn.build_torch            # beside the package, where flashattn.torch finds it
    python3 -m flashattn.build_torch FOLDER     # elsewhere: set FLASHATTN_TORCH_EXTENSION to the file

It needs a C++ compiler (CXX, else c++) and PyTorch 2.10 or newer. The file serves any version of Python, and PyTorch from 2.10 on.
"""

import sys

from ._build import main

if __name__ == "__main__":
    sys.exit(main("torch", sys.argv[1:]))
