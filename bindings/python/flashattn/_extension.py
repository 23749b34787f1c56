# SPDX-License-Identifier: Apache-2.0
"""The extensions in C++: how they are found and loaded. build_torch.py and build_jax.py build them."""

from __future__ import annotations

import ctypes
import os
from typing import Optional

from . import _abi

FIND = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)


def find(name: bytes) -> Optional[int]:
    """The address of a function of libflashattn."""
    return address_in(_abi.lib, name)


def address_in(library: ctypes.CDLL, name: bytes) -> Optional[int]:
    """The address of a function of a library, or None."""
    function = getattr(library, name.decode(), None)
    return ctypes.cast(function, ctypes.c_void_p).value if function is not None else None


class Extension:
    """An extension, if there is one for this library and this framework; it is true then. `reason` says why there is none.

    Subclasses load it: `_load` sets `_loaded`, or raises OSError, AttributeError or ImportError.
    """

    def __init__(self, framework: str) -> None:
        self.path = ""
        self.reason = ""
        self._loaded: Optional[ctypes.CDLL] = None
        variable = f"FLASHATTN_{framework.upper()}_EXTENSION"
        chosen = os.environ.get(variable)
        if chosen == "0":
            self.reason = f"{variable} is 0"
            return
        path = chosen or os.path.join(os.path.dirname(os.path.abspath(__file__)), f"libflashattn_{framework}.so")
        if not chosen and not os.path.exists(path):
            self.reason = f"it was not built: python3 -m flashattn.build_{framework}"
            return
        try:
            self._load(path)
            self.path = path
        except (OSError, AttributeError, ImportError) as error:
            self.reason = f"{path}: {error}"
            if chosen:  # an explicit choice is not passed over
                raise ImportError(f"{variable}: {self.reason}") from error

    def _load(self, path: str) -> None:
        raise NotImplementedError

    def __bool__(self) -> bool:
        return self._loaded is not None
