# SPDX-License-Identifier: Apache-2.0
"""Tests of the Python package."""

import os
import unittest

_extension = os.environ.get("FLASHATTN_TORCH_EXTENSION", "0")
if _extension != "0" and not os.path.exists(_extension):
    raise unittest.SkipTest("the extension for PyTorch was not built")
