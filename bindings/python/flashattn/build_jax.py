# SPDX-License-Identifier: Apache-2.0
"""Builds the extension through which XLA calls the library without Python: jax_handlers.cpp, against the headers of XLA's FFI that jaxlib has.

    python3 -m flashattn.build_jax            # beside the package, where flashattn.jax finds it
    python3 -m flashattn.build_jax FOLDER     # elsewhere: set FLASHATTN_JAX_EXTENSION to the file

It needs a C++ compiler (CXX, else c++) and jaxlib. The file serves any version of Python.
"""

import sys

from ._build import main

if __name__ == "__main__":
    sys.exit(main("jax", sys.argv[1:]))
