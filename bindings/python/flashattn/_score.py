# SPDX-License-Identifier: Apache-2.0
"""Score functions and masks of one's own."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

from . import _abi
from ._error import check

#: A Python function, or the address of a compiled one that flashattn.h describes.
Function = Union[Callable[..., Any], int, None]

_ACCESS = {"b": _abi.SCORE_BY_BATCH, "h": _abi.SCORE_BY_HEAD, "i": _abi.SCORE_BY_QUERY, "j": _abi.SCORE_BY_KEY}


def access_of(letters: str) -> int:
    """FA_SCORE_BY_* bits of "any" or of some letters of "bhij"."""
    if letters == "any":
        return _abi.SCORE_BY_ANY
    unknown = set(letters) - set(_ACCESS)
    if unknown:
        raise ValueError(f'access is {letters!r}; it must be "any" or some of the letters "bhij"')
    return sum(_ACCESS[letter] for letter in set(letters))


class Score:
    """A score function of a context, for the option `score` of its calls. `Context.score` makes it.

    The context must be open when it is used. Destroying it during a call is safe.
    """

    def __init__(
        self,
        context: Any,
        score: Function = None,
        derivative: Function = None,
        visible: Function = None,
        tile: Function = None,
        *,
        run: Optional[int] = None,
        run_backward: Optional[int] = None,
        run_visible: Optional[int] = None,
        user: Optional[int] = None,
        text: Optional[str] = None,
    ) -> None:
        self._handle: Optional[ctypes.c_void_p] = None
        self._failures: List[BaseException] = []
        self._kept: List[Any] = []  # what the library calls for as long as the handle lives
        source = _abi.fa_score_source()
        check(_abi.lib.fa_score_source_init(ctypes.byref(source), ctypes.sizeof(source)))
        source.score = self._address(score, _abi.SCORE_FN, lambda f: lambda s, p, _aux: f(s, p.contents), 0.0)
        source.derivative = self._address(derivative, _abi.SCORE_FN, lambda f: lambda s, p, _aux: f(s, p.contents), 0.0)
        source.visible = self._address(visible, _abi.SCORE_VISIBLE_FN, lambda f: lambda p, _aux: bool(f(p.contents)), 0)
        source.tile = self._address(tile, _abi.SCORE_TILE_FN, lambda f: lambda p, m, n, _aux: f(p.contents, m, n), 0)
        source.run, source.run_backward, source.run_visible, source.user = run, run_backward, run_visible, user
        if text is not None:
            data = ctypes.create_string_buffer(text.encode())
            self._kept.append(data)
            source.text, source.text_length = ctypes.addressof(data), len(data.value)
        handle = ctypes.c_void_p()
        check(_abi.lib.fa_score_create(context._open(), ctypes.byref(source), ctypes.byref(handle)), context._handle)
        self._handle = handle

    def _address(self, function: Function, kind: Any, adapt: Callable[[Any], Any], failed: Any) -> Optional[int]:
        if function is None or isinstance(function, int):
            return function
        adapted = adapt(function)

        def guarded(*arguments: Any) -> Any:
            try:
                return adapted(*arguments)
            except BaseException as failure:  # it cannot pass through the library: the call raises it when it is done
                self._failures.append(failure)
                return failed

        callback = kind(guarded)
        self._kept.append(callback)
        return ctypes.cast(callback, ctypes.c_void_p).value

    def _raise_failure(self) -> None:
        if self._failures:
            failure = self._failures[0]
            self._failures.clear()
            raise failure

    def close(self) -> None:
        """Destroys the score function. It cannot be used afterwards."""
        handle, self._handle = self._handle, None
        if handle:
            _abi.lib.fa_score_destroy(handle)

    def __enter__(self) -> "Score":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise ValueError("the score function is closed")
        return self._handle


def set_score(
    problem: _abi.fa_attention,
    score: Optional[Score],
    tensors: Sequence[Tuple[Any, str]],
    scalars: Sequence[float],
    view: Callable[[Any, str], _abi.fa_tensor],
    holds: List[Any],
) -> None:
    """Sets the score fields of a problem."""
    if score is not None:
        problem.score = score._open()
        holds.append(score)
    if tensors:
        array = (_abi.fa_score_tensor * len(tensors))()
        for n, (tensor, letters) in enumerate(tensors):
            array[n].tensor = view(tensor, f"score_tensors[{n}]")
            array[n].access = access_of(letters)
        holds.append(array)
        problem.score_tensors = ctypes.addressof(array)
        problem.num_score_tensors = len(tensors)
    if len(scalars) > 8:
        raise ValueError(f"there are {len(scalars)} score_scalars; there may be up to 8")
    for n, scalar in enumerate(scalars):
        problem.score_scalars[n] = scalar
