"""What is given to an ONNX model, checked against what its graph declares before a runtime sees it.

Contract: a wrong name, type or shape is a `ValueRefusedError` that says what was expected and found; so is what a
runtime refuses. Arrays are never converted silently, plain Python numbers and lists take the declared type.
`tests/test_onnx_inputs.py` enforces this, with onnxruntime where it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray


def feeds_of(declared: Mapping[str, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by name.

    Parameters
    ----------
    declared
        Name -> type and shape in words, as `onnx_types` has them: ``FLOAT n × 3``.

    Raises
    ------
    ValueRefusedError
        An input is missing, given twice, not one of the model's, or of another type or shape.
    """
    wanted = list(declared)
    known = ", ".join(f"{quote(n)} ({visible(declared[n], 80)})" for n in wanted[:20]) or "none"
    if len(args) > len(wanted):
        raise ValueRefusedError(f"{len(args)} inputs are given, the model has {len(wanted)}: {known}")
    given = dict(zip(wanted, args, strict=False))
    for name, value in kwargs.items():
        if name not in wanted or name in given:
            raise ValueRefusedError(f"{quote(name)} is no input of the model, or is given twice; inputs: {known}")
        given[name] = value
    missing = [n for n in wanted if n not in given and not declared[n].startswith("optional")]
    if missing:
        raise ValueRefusedError(f"input {quote(missing[0])} ({visible(declared[missing[0]], 80)}) is missing")
    return {name: _checked(name, declared[name], value) for name, value in given.items()}


def _checked(name: str, kind: str, value: Any) -> Any:
    """A tensor as the array it has to be; anything else as it is."""
    import numpy as np

    if kind.startswith(("sequence", "map", "optional", "sparse")):
        return value
    word, _, shape = kind.partition(" ")
    dtype = _dtype(word)
    try:
        array = np.asarray(value, None if hasattr(value, "dtype") else dtype)
    except (TypeError, ValueError, OverflowError) as exc:
        raise _wrong(name, kind, f"{type(value).__name__} is no array of that ({visible(str(exc), 80)})") from None
    found = f"{array.dtype} {' × '.join(map(str, array.shape)) or 'scalar'}"
    if word == "STRING":
        if array.dtype.kind not in "OUST":
            raise _wrong(name, kind, found)
        array = array.astype(object)
    elif dtype is not None and array.dtype.newbyteorder("=") == dtype:
        array = array.astype(dtype, copy=False)  # a matter of byte order only
    elif dtype is not None:
        raise _wrong(name, kind, f"{found}; convert it with .astype({dtype.name!r})")
    if shape and not _fits(shape, array):
        raise _wrong(name, kind, found)
    return array


def _wrong(name: str, kind: str, found: str) -> ValueRefusedError:
    return ValueRefusedError(f"input {quote(name)}: {visible(kind, 80)} was expected, found {found}")


def _dtype(word: str) -> np.dtype[Any] | None:
    """NumPy's type of ONNX's word; None for text and for what is not known."""
    from ..encodings import ENCODINGS
    from ..encodings.values import numpy_dtype
    from ..formats.onnx_tensors import DATA_TYPES

    encoding = next((row[1] for row in DATA_TYPES.values() if row[0] == word), None)
    return None if encoding is None else numpy_dtype(ENCODINGS[encoding].dtype)


def _fits(shape: str, array: NDArray[Any]) -> bool:
    """Whether an array has the declared shape; a dimension that is a name or unknown takes any size."""
    dims = [] if shape == "scalar" else shape.split(" × ")
    if len(dims) != array.ndim:
        return False
    return all(not d.isdecimal() or int(d) == n for d, n in zip(dims, array.shape, strict=True))


def guarded(
    run: Callable[[dict[str, Any]], list[Any]], what: str, errors: tuple[type[Exception], ...]
) -> Callable[[dict[str, Any]], list[Any]]:
    """A runner whose own exceptions become ours."""

    def guard(feeds: dict[str, Any]) -> list[Any]:
        try:
            return run(feeds)
        except errors as exc:
            lines = [line for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
            shapes = ", ".join(f"{quote(n)} {getattr(v, 'shape', type(v).__name__)}" for n, v in feeds.items())
            said = visible(lines[0], 300)
            raise ValueRefusedError(f"{what} cannot run the model on these inputs ({shapes}): {said}") from None

    return guard
