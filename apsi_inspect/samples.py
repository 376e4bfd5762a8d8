"""Small model files to try things on: a real model and its int8 twin that come with the package, and generated ones.

The real ones are the weights of Fracast-0, an Apache-2.0 time-series model of 85 001 parameters. The generated ones are
the same bytes on every machine. `tests/test_samples.py` opens them with independent readers.
"""

from __future__ import annotations

import os

from . import samples_make
from .atomic import write_bytes
from .errors import ValueRefusedError, quote
from .permit import check_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_DATA = os.path.join(os.path.dirname(__file__), "data")
REAL = ("fracast.safetensors", "fracast-int8.safetensors")


def names() -> list[str]:
    """The samples there are."""
    return [*REAL, *_MAKERS]


def path(name: str) -> str:
    """Path of a real sample inside the package.

    Raises
    ------
    ValueRefusedError
        No such sample; the generated ones have no place of their own, `write` makes them.
    """
    if name not in REAL:
        raise ValueRefusedError(
            f"no bundled sample {quote(name)}; bundled: {', '.join(REAL)}; others: samples.write(…)"
        )
    return os.path.join(_DATA, name)


def write(folder: str | os.PathLike[str], only: Iterable[str] | None = None) -> list[str]:
    """Write the samples into a folder (made where it is missing) and return their paths.

    Parameters
    ----------
    folder
        Where to; files of the same names are replaced.
    only
        Some of `names`; None: all.
    """
    wanted = list(names() if only is None else only)
    unknown = [n for n in wanted if n not in names()]
    if unknown:
        raise ValueRefusedError(f"no sample {quote(unknown[0])}; samples: {', '.join(names())}")
    if not os.path.isdir(folder):
        check_write(folder)
        os.makedirs(folder)
    paths = []
    for name in wanted:
        target = os.path.join(os.fsdecode(folder), name)
        if name in REAL:
            with open(path(name), "rb") as f:
                write_bytes(target, f.read(), durable=False)
        else:
            _MAKERS[name](target)
        paths.append(target)
    return paths


_MAKERS: dict[str, Callable[[str], None]] = {
    "tiny-llama.gguf": samples_make.gguf,
    "oscillator.apsim": samples_make.apsim,
    "tiny-checkpoint.pt": samples_make.checkpoint,
    "tiny-network.onnx": samples_make.onnx,
}
