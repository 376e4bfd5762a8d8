"""Which tensor of one model is which of another: by name, by the maps of the `gguf` package, by a common prefix.

Contract: every tensor is in one pair at most, and none is matched on a guess: where two names of one model would go to
the same tensor, neither does. In order: equal names; the names that `gguf`'s converters give (where one model says its
GGUF architecture), also after one leading part is dropped or added; one leading part that the models do not share;
tied output matrices. What converters do to the values (`hf_layouts`) goes with the pair. Only headers are read.
`tests/test_align.py` enforces this.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..errors import quote
from ..listing import companions, natural_key, plural
from ..model import Finding
from .companion_scales import CODES
from .hf_layouts import LEFT_OUT, MADE, Facts, Layout, facts_of, layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..model import ModelFile

    Rename = Callable[[str], str | None]

_EMBEDDINGS = ("token_embd.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_OUTPUTS = ("output.weight", "lm_head.weight", "embed_out.weight")
_ADDED = ("model.", "transformer.", "bert.", "model.language_model.")
_PARTS = 3  # leading components that may be dropped
_ROUNDS = 4
_CONSTANT = 64  # elements
_SAMPLE = 200  # names on which prefixes are tried


class Pair(NamedTuple):
    """A tensor in two models.

    Attributes
    ----------
    a, b
        Its names; None: it is not there.
    how
        ``"name"``, ``"map"`` (of the gguf package), ``"prefix"``, ``"codes"`` (``X.qweight`` with ``X``) or ``"tied"``
        (the output matrix of one with the embedding of the other, which has no output matrix of its own).
    layout
        What a converter does to the values on the way from the Hugging Face form; None: nothing.
    """

    a: str | None
    b: str | None
    how: str = "name"
    layout: Layout | None = None

    @property
    def name(self) -> str:
        """Its name in the first model that has it."""
        return self.a if self.a is not None else self.b or ""


class Alignment(NamedTuple):
    """All pairs in natural order of their names, and what was done to find them."""

    pairs: tuple[Pair, ...]
    notes: tuple[Finding, ...]


class _Work:
    """Names that are still alone, and the pairs so far."""

    def __init__(self, a: ModelFile, b: ModelFile) -> None:
        self.models = a, b
        self.alone: tuple[dict[str, None], dict[str, None]] = dict.fromkeys(a), dict.fromkeys(b)
        self.pairs: list[Pair] = []
        self.notes: list[Finding] = []

    def match(self, one: str, other: str, how: str, side: int, layout: Layout | None = None) -> None:
        """Pair `one` of model `side` with `other` of the other model."""
        del self.alone[side][one], self.alone[1 - side][other]
        a, b = (one, other) if side == 0 else (other, one)
        self.pairs.append(Pair(a, b, how, layout))

    def note(self, code: str, message: str, severity: str = "note") -> None:
        self.notes.append(Finding(severity, code, message))

    def word(self, side: int) -> str:
        return "AB"[side]


def align(a: ModelFile, b: ModelFile) -> Alignment:
    """Pair the tensors of two models.

    Returns
    -------
    Alignment
        Tensors that only one of them has are pairs with a None. Companions of a quantized tensor (scales, zero points)
        that have no counterpart are no pairs: they belong to their tensor.
    """
    w = _Work(a, b)
    for name in [n for n in w.alone[0] if n in w.alone[1]]:
        w.match(name, name, "name", 0)
    for side in (0, 1):
        hit = _unique(w.alone[side], lambda n: n.removesuffix(CODES) if n.endswith(CODES) else None, w.alone[1 - side])
        for name, plain in hit.items():
            w.match(name, plain, "codes", side)
        if hit:
            some = f"{plural(len(hit), 'tensor')} of {w.word(side)}"
            w.note("codes", f"{some} matched as codes with scales beside them: X{CODES} is X")
    for side in (0, 1):
        facts = facts_of(w.models[side])
        if facts is not None and w.alone[side] and w.alone[1 - side]:
            _by_map(w, side, facts)
    _by_prefix(w)
    for side in (0, 1):
        _set_aside(w, side)
        _tied(w, side)
    missing = [Pair(n, None, "") for n in w.alone[0]] + [Pair(None, n, "") for n in w.alone[1]]
    return Alignment(tuple(sorted([*w.pairs, *missing], key=lambda p: natural_key(p.name))), tuple(w.notes))


def _unique(names: Iterable[str], rename: Rename, wanted: Mapping[str, None]) -> dict[str, str]:
    """Names whose new name is wanted, and that of no other."""
    found = {n: new for n in names if (new := rename(n)) is not None and new in wanted}
    counts = Counter(found.values())
    return {n: new for n, new in found.items() if counts[new] == 1}


def _sample(names: Mapping[str, None]) -> list[str]:
    """Some of many names, from all over."""
    return list(names)[:: max(1, len(names) // _SAMPLE)]


def _prefixes(names: Iterable[str]) -> list[tuple[str, str]]:
    """(dropped, added): what may tell two spellings of a name apart."""
    starts: dict[str, None] = {}
    for n in names:
        parts = n.split(".", _PARTS)[:-1]
        starts |= dict.fromkeys(".".join(parts[:k]) + "." for k in range(1, len(parts) + 1))
        if len(starts) > 10 * _PARTS:
            break
    return [("", ""), *((s, "") for s in starts), *(("", p) for p in _ADDED)]


def _respelt(drop: str, add: str) -> Rename:
    return lambda n: add + n.removeprefix(drop) if n.startswith(drop) else None


def _by_map(w: _Work, side: int, facts: Facts) -> None:
    """Match names of the other model that the maps turn into names of the model on `side`, which has GGUF's."""
    table = facts.table()
    if table is None:
        w.note("no-maps", "names of GGUF and Hugging Face are not matched: pip install gguf", "warning")
        return
    other, count = 1 - side, 0

    def renamed(drop: str, add: str) -> Rename:
        respelt = _respelt(drop, add)
        return lambda n: table(s) if (s := respelt(n)) else None

    counts = Counter(map(table, w.alone[other]))
    contested = [t for t in w.alone[side] if counts[t] > 1]
    wanted = {t: None for t in w.alone[side] if counts[t] <= 1}
    if contested:
        names = ", ".join(map(quote, contested[:3]))
        w.note("contested", f"several names of {w.word(other)} would be {names}: none is taken", "warning")
    for _ in range(_ROUNDS):
        sample = _sample(w.alone[other])
        ways = [(len(_unique(sample, renamed(*way), wanted)), way) for way in _prefixes(w.alone[other])]
        found, (drop, add) = max(ways, key=lambda way: way[0])
        if not found:
            break
        hit = _unique(w.alone[other], renamed(drop, add), wanted)
        for name, gguf_name in hit.items():
            w.match(name, gguf_name, "map", other, layout_of(name, gguf_name, facts, "ab"[other]))
            del wanted[gguf_name]
        count += len(hit)
        if drop or add:
            w.note("prefix", _said(drop, add, w.word(other), len(hit)))
    if count:
        w.note("map", f"{plural(count, 'tensor')} matched by gguf's name map of the architecture {quote(facts.arch)}")


def _said(drop: str, add: str, model: str, count: int) -> str:
    what = f"without {quote(drop)}" if drop else f"with {quote(add)} before them"
    return f"{plural(count, 'name')} of {model} matched {what}"


def _by_prefix(w: _Work) -> None:
    """One leading part that only one of the models has."""
    for side in (0, 1):
        if not w.alone[0] or not w.alone[1]:
            return
        hits = []
        for drop, _ in _prefixes(w.alone[side]):
            hit = _unique(w.alone[side], _respelt(drop, ""), w.alone[1 - side]) if drop else {}
            hits.append((len(hit), drop, hit))
        count, drop, hit = max(hits, key=lambda h: h[0])
        rivals = [h for h in hits if h[0] == count and h[2] != hit]
        if count and rivals:
            spelt = ", ".join(quote(h[1]) for h in (rivals[0], (count, drop, hit)))
            w.note("ambiguous-prefix", f"names of {w.word(side)} would match without {spelt}: none is taken", "warning")
        elif count:
            for name, other in hit.items():
                w.match(name, other, "prefix", side)
            w.note("prefix", _said(drop, "", w.word(side), count))


def _set_aside(w: _Work, side: int) -> None:
    """What has no counterpart for a reason: companions, what converters leave out, what they make."""
    model, alone = w.models[side], w.alone[side]
    owned = companions(list(model)).union(*(q.companions for q in model.affine.values()))
    other = facts_of(w.models[1 - side])
    for names, why in (
        ([n for n in alone if n in owned], "scales and the like, which count with their tensor"),
        ([n for n in alone if other and n.endswith(LEFT_OUT)], "what converters to GGUF leave out"),
        ([n for n in alone if facts_of(model) and n in MADE], "what converters to GGUF compute"),
        ([n for n in alone if _is_constant(model, n)], "small constants of the graph"),
    ):
        names = [n for n in names if n in alone]
        for n in names:
            del alone[n]
        if names:
            shown = ", ".join(quote(n) for n in names[:3]) + (", …" if len(names) > 3 else "")
            w.note("aside", f"only in {w.word(side)}, {why}: {shown}" + (f" ({len(names)})" if len(names) > 3 else ""))


def _is_constant(model: ModelFile, name: str) -> bool:
    """Shapes, axes and the like, which exporters to ONNX number as they come."""
    info = model.info(model.index[name])
    return model.format == "onnx" and info.encoding.kind in ("int", "uint", "bool") and prod(info.shape) <= _CONSTANT


def _tied(w: _Work, side: int) -> None:
    """A second name of bytes that are matched, and an output matrix where the other model uses its embedding."""
    model, alone = w.models[side], w.alone[side]
    places: dict[tuple[int, int, int], list[str]] = {}
    for name in [*alone, *(n for p in w.pairs if (n := (p.a, p.b)[side]) is not None)] if alone else []:
        info = model.info(model.index[name])
        if info.nbytes and name not in model.views:
            places.setdefault((info.file, info.offset, info.nbytes), []).append(name)
    for names in places.values():
        matched = [n for n in names if n not in alone]
        for n in [n for n in names if n in alone] if matched else []:
            del alone[n]
            w.note("tied", f"{quote(n)} of {w.word(side)} has the bytes of {quote(matched[0])}, which is matched")
    outputs = [n for n in alone if n.endswith(_OUTPUTS)]
    embeddings = [p for p in w.pairs if p.name.endswith(_EMBEDDINGS) and p.how != "tied"]
    if len(outputs) == 1 and len(embeddings) == 1:
        del alone[outputs[0]]
        partner = (embeddings[0].a, embeddings[0].b)[1 - side]
        a, b = (outputs[0], partner) if side == 0 else (partner, outputs[0])
        w.pairs.append(Pair(a, b, "tied"))
