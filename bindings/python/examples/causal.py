# SPDX-License-Identifier: Apache-2.0
"""Causal attention of 8 heads over 1024 rows, forward and backward, on NumPy arrays; without NumPy forward on plain buffers."""

import array

import flashattn

try:
    import numpy as np
except ImportError:
    np = None

if np is not None:
    q, k, v, dout = (np.random.standard_normal((1, 1024, 8, 64)).astype("float32") for _ in range(4))
    out, lse = flashattn.forward(q, k, v, causal=True)
    dq, dk, dv, *_ = flashattn.backward(dout, q, k, v, out, lse, causal=True)
    print("largest |dq|", abs(dq).max())
else:
    q = k = v = memoryview(array.array("f", [0.5] * (1024 * 8 * 64))).cast("B").cast("f", (1, 1024, 8, 64))
    out, lse = flashattn.forward(q, k, v, causal=True)
    print("out[0, 1023, 7, 63] =", out[0, 1023, 7, 63])
print("libflashattn", flashattn.version(), "kernel", flashattn.query_forward(q, k, v, causal=True).kernel)
