# SPDX-License-Identifier: Apache-2.0
"""Order between CUDA streams, by four functions of the driver, which is loaded when first needed."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_uint, c_void_p
from typing import Optional

LEGACY_STREAM = 1  # the driver's name for the default stream
_DISABLE_TIMING = 2
_driver: Optional[ctypes.CDLL] = None


def _load() -> ctypes.CDLL:
    global _driver
    if _driver is None:
        driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in (
            ("cuEventCreate", [POINTER(c_void_p), c_uint]),
            ("cuEventRecord", [c_void_p, c_void_p]),
            ("cuStreamWaitEvent", [c_void_p, c_void_p, c_uint]),
            ("cuEventDestroy_v2", [c_void_p]),
        ):
            function = getattr(driver, name)
            function.restype, function.argtypes = c_int, arguments
        _driver = driver
    return _driver


def wait(stream: int, producer: int) -> None:
    """Lets work enqueued on `stream` from now on begin after what is on `producer`. The host does not wait."""
    driver = _load()

    def check(result: int, what: str) -> None:
        if result != 0:
            raise RuntimeError(f"{what} failed with CUDA driver error {result}")

    event = c_void_p()
    check(driver.cuEventCreate(ctypes.byref(event), _DISABLE_TIMING), "cuEventCreate")
    try:
        check(driver.cuEventRecord(event, producer), "cuEventRecord")
        check(driver.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")
    finally:
        driver.cuEventDestroy_v2(event)
