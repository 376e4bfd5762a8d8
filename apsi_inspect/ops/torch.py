"""`torch_load`: a PyTorch file as the tree it holds, of NumPy arrays or torch tensors; nothing of the file is run.

Contract: arrays are read-only views of the mapped file where the bytes allow; a tensor that stands in several places is
one array. What is neither tensor nor plain value stays a `Skipped` that says what it was. `tests/test_torch.py`.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import MissingPackageError, ModelFileError, UnknownFormatError, ValueRefusedError, quote
from ..formats import sharded
from ..formats.pickle_nodes import Call, Dict, Global, Persistent
from ..formats.safetensors import sniff as is_safetensors
from ..formats.torch import load, sniff
from ..formats.torch_plain import LISTS, constant, container, plain
from ..formats.torch_tree import MAX_DEPTH, key_text
from ..tree import from_names, record
from .open import open as open_model
from .open import source_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..formats.torch import Loaded
    from ..model import ModelFile, Tensor


MAX_ALIKE = 1000  # keys of one hash


class Skipped(NamedTuple):
    """Stands for an object of a class that was not imported: the class's name, and the state as data."""

    path: str
    state: Any = None

    def __repr__(self) -> str:
        return f"<skipped {self.path}>"


def torch_load(path: str | os.PathLike[str], framework: str = "numpy") -> Any:
    """Load a PyTorch file without running anything of it, and without torch.

    Parameters
    ----------
    path
        A ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file of any age, a TorchScript archive, the index of a sharded
        checkpoint, or its folder.
    framework
        ``"numpy"``: read-only arrays, of ml_dtypes' types for bfloat16 and 8-bit floats. ``"torch"``: torch tensors.

    Returns
    -------
    record, dict, list or any other value
        What the file holds: dicts with text keys as records, other dicts as dicts, in the order of the file (an
        OrderedDict, Counter or defaultdict too); sets as sets, a ``torch.Size`` as a tuple, slices and ranges as such;
        a dtype as its name, ``"torch.float16"``, a device as ``"cuda:0"``; a quantized tensor as its float32 values;
        an object of any other class as a `Skipped`.

    Raises
    ------
    OSError
        The file is missing or unreadable.
    ModelFileError
        It is no PyTorch file, a damaged one, or one that would run code.
    MissingPackageError
        torch is asked for and not installed.
    """
    if framework not in ("numpy", "torch"):
        raise ValueRefusedError(f"framework {quote(str(framework))} is not known; known: numpy, torch")
    made = _to_torch if framework == "torch" else _to_numpy
    if framework == "torch":
        _torch()
    source = source_of(path)
    head = source.read_at(0, min(512, source.size))
    if is_safetensors(head, source.size):  # whose first bytes, a length, may look like a pickle's
        source.close()
        raise UnknownFormatError(source.name, "is a safetensors file, not PyTorch", hint="use load_safetensors")
    if sniff(head, source.size):
        try:
            return _build(load(source), made)
        except BaseException:
            source.close()
            raise
    source.close()
    if sharded.sniff(head, source.size):
        return _from_shards(open_model(path), made)
    raise UnknownFormatError(source.name, "is no PyTorch file", hint="use open")


def _from_shards(model: ModelFile, made: Any) -> Any:
    if model.format != "pytorch":
        raise UnknownFormatError(model.path, f"is {model.format}, not PyTorch", hint="use open")
    names = list(model.columns.names)
    tree = from_names(names, lambda name: made(model[name]))
    return tree if tree is not None else record((n, made(model[n])) for n in names)


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    array = tensor.numpy()
    array.flags.writeable = False
    return array


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise MissingPackageError("torch", "torch_load(framework='torch')", "torch") from exc
    return torch


def _to_torch(tensor: Tensor) -> Any:
    torch = _torch()
    array: NDArray[Any] = tensor.numpy()
    word = array.dtype.name
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(_writable(array))
    if word == "float4_e2m1fn":  # torch keeps two in a byte
        import numpy as np

        packed = np.array(np.frombuffer(tensor.raw(), np.uint8)).reshape(*array.shape[:-1], -1)
        return torch.from_numpy(packed).view(torch.float4_e2m1fn_x2)
    carrier = {1: "u1", 2: "i2"}[array.dtype.itemsize]
    return torch.from_numpy(_writable(array.view(carrier))).view(getattr(torch, word))


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """A copy: torch has no read-only tensors."""
    import numpy as np

    copy: np.ndarray[Any, Any] = np.array(array.astype(array.dtype.newbyteorder("="), copy=False))
    return copy


class _Builder:
    """From nodes to a tree; each node is built once, so that what the file shares stays shared."""

    def __init__(self, loaded: Loaded, made: Any) -> None:
        self.loaded, self.made = loaded, made
        self.built: dict[int, Any] = {}
        self.depth = 0
        self.arrays: dict[tuple[int, tuple[int, ...], str], Any] = {}

    def build(self, node: Any) -> Any:
        if isinstance(node, (Call, Dict, list, tuple)):
            if id(node) not in self.built:
                self.depth += 1
                if self.depth > MAX_DEPTH:
                    raise ModelFileError(
                        self.loaded.model.path, f"its pickle is nested deeper than {MAX_DEPTH} (or it contains itself)"
                    )
                self.built[id(node)] = self._make(node)
                self.depth -= 1
            return self.built[id(node)]
        if isinstance(node, Global):
            return constant(node) or Skipped(node.path)
        return Skipped("a storage") if isinstance(node, Persistent) else node

    def _make(self, node: Any) -> Any:
        if isinstance(node, Dict):
            return self._dict(node)
        if isinstance(node, list):
            out: list[Any] = []
            self.built[id(node)] = out
            out += [self.build(v) for v in node]
            return out
        if isinstance(node, tuple):
            return tuple(self.build(v) for v in node)
        return self._call(node)

    def _dict(self, node: Dict) -> Any:
        named = all(isinstance(k, str) for k, _ in node.pairs)
        out: Any = record() if named else {}
        self.built[id(node)] = out
        self._check_hashes([k for k, _ in node.pairs if isinstance(k, (int, float))])
        for key, value in node.pairs:
            simple = key is None or isinstance(key, (str, int, float, bytes))
            out[key if simple else key_text(key)] = self.build(value)
        return out

    def _call(self, node: Call) -> Any:
        name = self.loaded.walk.names.get(id(node))
        if name is not None:
            return self.made(self.loaded.model[name])
        inner = _unwrapped(node, self.loaded.walk.names)
        if inner is not None:
            return self.build(inner)
        is_plain, value = plain(node)
        if is_plain and node.path in LISTS:
            items = [self.build(v) for v in value]
            return self._set(node.path, items) if node.path.endswith("set") else container(node.path, items)
        if is_plain:
            return self.build(value)
        self.built[id(node)] = Skipped(node.path)  # where its state refers to it
        return Skipped(node.path, self.build(node.state))

    def _set(self, path: str, items: list[Any]) -> Any:
        """A set; a list where hashing its items would take long (tuples of tuples that are shared)."""
        todo, left = list(items), 16 * len(items) + 100_000
        while todo and left > 0:
            left -= 1
            item = todo.pop()
            todo += item[:left] if isinstance(item, tuple) else ()
        if todo:
            return items
        self._check_hashes([i for i in items if isinstance(i, (int, float, tuple))])
        return container(path, items)

    def _check_hashes(self, keys: list[Any]) -> None:
        """Numbers are easily made that all have one hash; a dict of them takes time with the square of their number."""
        if len(keys) > MAX_ALIKE:
            try:
                alike = max(Counter(map(hash, keys)).values())
            except TypeError:  # a tuple of arrays: no set will hold it
                return
            if alike > MAX_ALIKE:
                raise ModelFileError(
                    self.loaded.model.path, f"{alike} keys of a dict or set in its pickle have one hash"
                )


def _unwrapped(node: Call, names: dict[int, str]) -> Any:
    """A Parameter around a tensor that was listed on its own."""
    return next((a for a in node.args[:1] if isinstance(a, Call) and id(a) in names), None)


def _build(loaded: Loaded, made: Any) -> Any:
    for finding in loaded.model.findings:
        if finding.severity == "warning":
            warnings.warn(f"{loaded.model.path}: {finding.message}", stacklevel=3)
    return _Builder(loaded, made).build(loaded.root)
