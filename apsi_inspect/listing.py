"""Plain-Python rows of a model: what `apsi model info` prints, and what every view sums up.

Parameters are counted logically: a packed 4-bit tensor counts its weights, the companion of a quantized tensor (a
scale, a zero point, a codebook) counts nothing, and tensors that share the same bytes count once. No NumPy here.
`tests/test_listing.py` enforces the rules.
"""

from __future__ import annotations

import os
import re
from math import prod
from operator import itemgetter
from typing import NamedTuple

from .errors import ModelFileError, ValueRefusedError, quote, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .model import ModelFile


class Row(NamedTuple):
    """One tensor in a listing; the columns of the tensor table.

    Attributes
    ----------
    numel
        Elements of `shape`.
    bpw
        Stored bits per element; 0.0 for an empty tensor.
    file
        Base name of the file that holds it.
    unit
        Physical unit as text, or "".
    axis, block
        Scales of a quantized tensor: the axis they run along and the block length; None where there are none.
    role
        "" for parameters, "companion" for scales, zero points and the like of another tensor, "tied" where the same
        bytes have been counted under another name.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    bpw: float
    offset: int
    file: str
    unit: str
    axis: int | None
    block: int | None
    role: str


class Share(NamedTuple):
    """Sum over some tensors: of one encoding, one block, or all."""

    label: str
    tensors: int
    parameters: int
    nbytes: int


class Totals(NamedTuple):
    """Sums over a model; `bpw` is stored bits per logical parameter."""

    tensors: int
    parameters: int
    nbytes: int
    bpw: float
    by_encoding: list[Share]


class Group(NamedTuple):
    """A node of the folded tree.

    Attributes
    ----------
    label
        Name component, ``"N"`` standing for the number of a repeated block.
    count
        How many equal blocks it stands for (1: none are folded); the sums are over all of them.
    numbers
        Which blocks, e.g. ``"0–31"``; "" where count is 1.
    row
        The tensor (of the first block), for a leaf.
    """

    label: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    numbers: str
    tensors: int
    parameters: int
    nbytes: int
    row: Row | None
    children: list[Group]


class MetaRow(NamedTuple):
    """One key of the metadata: its type in the file's own word, and its value as text, long ones abbreviated."""

    key: str
    type: str
    text: str


# A companion's ending -> endings of the tensor it belongs to (compressed-tensors, modelopt, GPTQ, AWQ, MLX, gpt-oss).
_WEIGHT = (".weight", ".weight_packed")
_COMPANIONS: dict[str, tuple[str, ...]] = {
    ".weight_scale": _WEIGHT,
    ".weight_scale_inv": _WEIGHT,
    ".weight_scale_2": _WEIGHT,
    ".weight_global_scale": _WEIGHT,
    ".weight_zero_point": _WEIGHT,
    ".weight_g_idx": _WEIGHT,
    ".weight_shape": (".weight_packed",),
    ".input_scale": _WEIGHT,
    ".input_global_scale": _WEIGHT,
    ".output_scale": _WEIGHT,
    ".scales": (".qweight", ".weight"),
    ".scale": (".qweight",),
    ".qzeros": (".qweight",),
    ".g_idx": (".qweight",),
    "_scales": ("_blocks",),
}
# bitsandbytes keeps its parts below the weight's own name
_BELOW = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
_BITSANDBYTES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_ENDINGS = (*_COMPANIONS, *_BELOW, *_BITSANDBYTES, ".biases")
_PACKED = (*_BITSANDBYTES, "_blocks", ".weight_packed", ".qweight")
_TAIL = itemgetter(slice(-8, None))
_NUMBER = re.compile(r"([0-9]+)")
MAX_TEXT = 240
MAX_DEPTH, MAX_DOTS, FEW = 256, 100_000, 8  # of the folded tree


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sort key in which ``blk.2`` comes before ``blk.10``."""
    parts = _NUMBER.split(name)
    return [(0, int(p)) if i % 2 and len(p) < 4000 else (1, p) for i, p in enumerate(parts)]


def human_size(nbytes: float) -> str:
    """Bytes as B, KiB, MiB, GiB, TiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_count(n: int) -> str:
    """A count as 987, 12.3 k, 134.5 M, 7.24 B, 1.2 T."""
    if n < 1000:
        return str(n)
    value = float(n)
    for unit in ("k", "M", "B", "T"):
        value /= 1000
        if value < 999.95 or unit == "T":
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def plural(n: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def candidates(names: Sequence[str]) -> list[str]:
    """The names whose ending says that they may be companions or packed; the rest are not looked at further.

    The few distinct tails of all names are looked at first: most models have none.
    """
    endings = (*_ENDINGS, *_PACKED)
    tails = set(map(_TAIL, names))
    if len(tails) < 1000:
        endings = tuple(e for e in endings if any(tail.endswith(e[-8:]) for tail in tails))
    return [n for n in names if n.endswith(endings)] if endings else []


def companions(names: Sequence[str], among: Sequence[str] | None = None) -> set[str]:
    """The names that are scales, zero points or codebooks of another tensor among them.

    Parameters
    ----------
    among
        What `candidates` found, where the caller has it.
    """
    among = candidates(names) if among is None else among
    if not among:
        return set()
    there = set(names)
    return {n for n in among if _is_companion(n, there)}


def _is_companion(name: str, there: set[str]) -> bool:
    for ending in (*_BELOW, *_BITSANDBYTES):
        if name.endswith(ending):
            return name.removesuffix(ending) in there
    if name.endswith(".biases"):  # MLX keeps scales and biases; a plain `biases` is a parameter
        stem = name.removesuffix(".biases")
        return f"{stem}.scales" in there and f"{stem}.weight" in there
    for ending, owners in _COMPANIONS.items():
        if name.endswith(ending):
            stem = name.removesuffix(ending)
            return any(stem + owner in there for owner in owners)
    return False


def packing(model: ModelFile, among: Sequence[str] | None = None) -> dict[str, int]:
    """How many weights one stored element holds, for tensors that pack several (from the header alone).

    Parameters
    ----------
    among
        What `candidates` found, where the caller has it.
    """
    among = candidates(model.columns.names) if among is None else among
    names = model.index if among else {}
    factors: dict[str, int] = {}
    for name in among:
        if name.endswith(_BITSANDBYTES):
            owner = name.partition(".quant_state.")[0]
            if owner in names:
                factors[owner] = 2
        elif name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in names:
            factors[name] = 2  # gpt-oss MXFP4: two codes a byte
        elif name.endswith(".weight_packed") and model.info(names[name]).encoding.name == "U8":
            factors[name] = 2  # NVFP4: two codes a byte
        elif name.endswith(".qweight"):
            factors[name] = _gptq(model, name.removesuffix(".qweight"))
    return {name: factor for name, factor in factors.items() if factor > 1}


def _gptq(model: ModelFile, stem: str) -> int:
    """GPTQ and AWQ: zero points are packed like the weights, scales are not; so their widths tell how many a word."""
    names = model.index
    if f"{stem}.qzeros" not in names or f"{stem}.scales" not in names:
        return 1
    zeros, scales = (model.info(names[f"{stem}.{part}"]).shape for part in ("qzeros", "scales"))
    if not zeros or not scales or not zeros[-1] or scales[-1] % zeros[-1]:
        return 1
    return scales[-1] // zeros[-1]


def rows(model: ModelFile, tensors: str | None = None, sort: str | None = None) -> list[Row]:
    """The tensors as rows.

    Parameters
    ----------
    tensors
        Keep only names that match this glob (``"blk.0.*"``).
    sort
        A column of `Row`, ``"-nbytes"`` for descending; None: natural order of the names; ``"file"``: as stored.

    Raises
    ------
    ValueRefusedError
        No such column.
    """
    c = model.columns
    files = [os.path.basename(f) for f in model.files]
    aside = companions(c.names).union(*(a.companions for a in model.affine.values()))
    seen: set[tuple[int, int, int]] = set()
    out = []
    for i in range(len(c.names)):
        info = model.info(i)
        place = (info.file, info.offset, info.nbytes)
        role = "companion" if info.name in aside else "tied" if info.nbytes and place in seen else ""
        seen.add(place)
        numel = prod(info.shape)
        q = info.qparams or info.affine
        out.append(
            Row(
                info.name,
                info.encoding.name,
                info.shape,
                numel,
                info.nbytes,
                8 * info.nbytes / numel if numel else 0.0,
                info.offset,
                files[info.file],
                str(info.unit) if info.unit is not None else "",
                q.axis if q else None,
                q.block if q else None,
                role,
            )
        )
    return choose(out, tensors, sort)


def choose(stored: list[Row], tensors: str | None = None, sort: str | None = None) -> list[Row]:
    """Some of the rows in another order, as `rows` does it; `stored` are all of them in file order."""
    check_sort(sort)
    if tensors is not None:
        match = glob(tensors)
        stored = [r for r in stored if match(r.name)]
    return _sorted(stored, sort)


def check_sort(sort: str | None) -> None:
    """Refuse to sort by a column that there is not."""
    column = (sort or "name").lstrip("-")
    if column not in Row._fields:
        raise ValueRefusedError(f"no column {quote(column)} to sort by; columns: {', '.join(Row._fields)}")


def glob(pattern: str) -> Any:
    """A matcher for a shell-style pattern, case-sensitive, over the whole name."""
    import fnmatch

    return re.compile(fnmatch.translate(pattern)).match


def _sorted(out: list[Row], sort: str | None) -> list[Row]:
    if sort is None or sort.lstrip("-") == "name":
        return sorted(out, key=lambda r: natural_key(r.name), reverse=bool(sort and sort[0] == "-"))
    column = sort.lstrip("-")
    if column in ("file", "offset"):
        return out[:: -1 if sort[0] == "-" else 1]
    at = Row._fields.index(column)
    out.sort(key=lambda r: natural_key(r.name))  # the order of equal values
    return sorted(out, key=lambda r: (r[at] is None, r[at] if r[at] is not None else 0), reverse=sort[0] == "-")


def parameters(row: Row, factors: dict[str, int]) -> int:
    """Logical parameters of a row."""
    return 0 if row.role else row.numel * factors.get(row.name, 1)


def totals(model: ModelFile, listed: Sequence[Row] | None = None) -> Totals:
    """Sums over the model (or over some of its rows)."""
    listed = rows(model, sort="file") if listed is None else listed
    factors = packing(model)
    by: dict[str, list[int]] = {}
    for r in listed:
        share = by.setdefault(r.encoding, [0, 0, 0])
        share[0] += 1
        share[1] += parameters(r, factors)
        share[2] += r.nbytes if r.role != "tied" else 0
    shares = sorted((Share(e, *s) for e, s in by.items()), key=lambda s: -s.nbytes)
    count, nbytes = sum(s.parameters for s in shares), sum(s.nbytes for s in shares)
    return Totals(len(listed), count, nbytes, 8 * nbytes / count if count else 0.0, shares)


def block_of(name: str) -> str:
    """The block a name belongs to: up to its first number (``blk.3``, ``model.layers.3``), else its first component."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal() and part.isascii():
            return ".".join(parts[: i + 1])
    return parts[0]


def blocks(model: ModelFile, listed: Sequence[Row] | None = None) -> list[Share]:
    """Sums per layer or block, in natural order."""
    listed = rows(model, sort="file") if listed is None else listed
    factors = packing(model)
    by: dict[str, list[int]] = {}
    for r in listed:
        share = by.setdefault(block_of(r.name), [0, 0, 0])
        share[0] += 1
        share[1] += parameters(r, factors)
        share[2] += r.nbytes if r.role != "tied" else 0
    return [Share(b, *by[b]) for b in sorted(by, key=natural_key)]


def folded(model: ModelFile, listed: Sequence[Row] | None = None) -> list[Group]:
    """The tree of names with equal numbered blocks folded into one.

    Where names have absurdly many components, they are split at their first few dots only.
    """
    listed = rows(model) if listed is None else listed
    factors = packing(model)
    dots = sum(r.name.count(".") for r in listed)
    depth = FEW if dots > FEW * len(listed) + MAX_DOTS else MAX_DEPTH
    root: dict[str, Any] = {}
    for r in listed:
        node = root
        *inner, last = r.name.split(".", depth)
        for part in inner:
            child = node.setdefault(part, {})
            node = child if isinstance(child, dict) else node.setdefault(part + ".", {})
        node[last + ("" if last not in node else " ")] = r
    return _fold(root, factors, {})[0]


def _fold(node: dict[str, Any], factors: dict[str, int], known: dict[Any, int]) -> tuple[list[Group], int]:
    """Groups of one level, and a number that is equal for equal structures."""
    groups: list[tuple[str, Group, int]] = []
    for part, child in node.items():
        if isinstance(child, dict):
            children, shape = _fold(child, factors, known)
            groups.append((part, _node(part, children), shape))
        else:
            shape = known.setdefault((child.encoding, child.shape, child.unit, child.role), len(known))
            groups.append((part, Group(part, 1, "", 1, parameters(child, factors), child.nbytes, child, []), shape))
    merged = _merge(groups)
    return merged, known.setdefault(tuple((part, shape) for part, _, shape in groups), len(known))


def _node(part: str, children: list[Group]) -> Group:
    """An inner node; one with a single child is drawn as one (``attn_k.weight``, ``blk.N``)."""
    if len(children) == 1:
        only = children[0]
        return only._replace(label=f"{part}.{only.label}")
    return Group(part, 1, "", *_sums(children), None, children)


def _sums(groups: list[Group]) -> tuple[int, int, int]:
    return sum(g.tensors for g in groups), sum(g.parameters for g in groups), sum(g.nbytes for g in groups)


def _merge(groups: list[tuple[str, Group, int]]) -> list[Group]:
    alike: dict[tuple[bool, Any], list[Group]] = {}
    for part, group, shape in groups:
        numbered = part.isascii() and part.isdecimal()
        alike.setdefault((numbered, shape if numbered else part), []).append(group)
    out = []
    for (numbered, _), same in alike.items():
        if not numbered or len(same) == 1 or same[0].count > 1:
            out += same
            continue
        _, dot, rest = same[0].label.partition(".")
        numbers = ranges([int(g.label.partition(".")[0]) for g in same])
        out.append(Group(f"N{dot}{rest}", len(same), numbers, *_sums(same), same[0].row, same[0].children))
    return out


def ranges(numbers: list[int]) -> str:
    """``0–3, 7, 9–11``."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    text = [str(a) if a == z else f"{a}–{z}" for a, z in spans]
    return ", ".join(text[:12]) + (f", … ({len(text) - 12} more)" if len(text) > 12 else "")


def metadata_rows(model: ModelFile) -> list[MetaRow]:
    """The metadata, typed, a line each."""
    types = getattr(model.metadata, "types", {})
    return [MetaRow(key, types.get(key) or _type_word(value), brief(value)) for key, value in model.metadata.items()]


def _type_word(value: Any) -> str:
    if isinstance(value, dict):
        return "record"
    return {None: "null"}.get(value, type(value).__name__) if value is None else type(value).__name__


def brief(value: Any, limit: int = MAX_TEXT) -> str:
    """A metadata value as one safe line, long ones abbreviated."""
    if isinstance(value, str):
        return visible(value, limit)
    if isinstance(value, (list, tuple)) or hasattr(value, "element_type"):
        n = len(value)
        kind = f"{getattr(value, 'element_type', '').lower()}s" if hasattr(value, "element_type") else "items"
        count = f"{n:,} {kind}".replace(",", " ")
        try:
            if n <= 2 * 3:
                return "[" + ", ".join(_item(v) for v in value[:]) + "]"
            return f"{count}: [{', '.join(map(_item, value[:3]))}, …, {', '.join(map(_item, value[n - 3 :]))}]"
        except ModelFileError:  # a view never raises
            return f"({count}; the file is closed or has changed)"
    if isinstance(value, float):
        return repr(value)
    return visible(str(value), limit)


def _item(value: Any) -> str:
    return quote(value, 40) if isinstance(value, str) else brief(value, 60)


def one_line(model: ModelFile) -> str:
    """The `repr` of a model."""
    t = totals(model)
    arch = f" {visible(model.architecture, 40)}" if model.architecture else ""
    return (
        f"<ModelFile {quote(os.path.basename(model.path))}: {model.format}{arch}, {plural(t.tensors, 'tensor')}, "
        f"{human_count(t.parameters)} parameters, {t.bpw:.2f} bits per weight, {human_size(model.file_size)}>"
    )
