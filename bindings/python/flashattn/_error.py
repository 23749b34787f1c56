# SPDX-License-Identifier: Apache-2.0
"""Failures of the library as exceptions."""

from __future__ import annotations

from . import _abi


class Error(RuntimeError):
    """A call the library refused or could not complete.

    `status` is the number, `name` the constant ("FA_ERROR_SHAPE"), `text` the library's sentence about this call.
    """

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.name = _abi.lib.fa_status_name(status).decode()
        self.text = text or _abi.lib.fa_status_description(status).decode()
        super().__init__(f"{self.name}: {self.text}")

    def __reduce__(self):
        return (Error, (self.status, self.text))


def check(status: int, context: "object | None" = None) -> None:
    """Raises `Error` with the text of the context (of this thread without one) unless the status is FA_OK."""
    if status != _abi.OK:
        raise Error(status, _abi.lib.fa_last_error(context).decode("utf-8", "replace"))
