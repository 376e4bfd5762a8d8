"""Tensors that a conversion leaves out, and all that a target cannot take, said at once.

Contract: a pattern that matches no name is refused; the tree loses what is left out and nothing else (in a list or a
tuple its place holds None, so that the others keep theirs). `tests/test_convert_exclude.py` enforces this.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..errors import ValueRefusedError, quote
from ..model import Finding

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MOST = 200  # names in a message
_NOTHING: dict[str, Any] = {"$literal": None}


def excluded(names: Sequence[str], patterns: str | Sequence[str] | None) -> list[str]:
    """The names that match one of the globs, in order.

    Raises
    ------
    ValueRefusedError
        A pattern matches no name.
    """
    chosen = [patterns] if isinstance(patterns, str) else list(patterns or ())
    for pattern in chosen:
        if not isinstance(pattern, str) or not any(fnmatchcase(n, pattern) for n in names):
            raise ValueRefusedError(f"exclude: {quote(str(pattern))} matches no tensor name")
    return [n for n in names if any(fnmatchcase(n, p) for p in chosen)]


def pruned(skeleton: Any, gone: Collection[str]) -> Any:
    """A tree without some of its leaves; records that only held those are gone too."""
    if skeleton is None or not gone:
        return skeleton
    found = _pruned(skeleton, gone)
    return {"$record": []} if found is _NOTHING else found


def _pruned(node: Any, gone: Collection[str]) -> Any:
    if isinstance(node, str):
        return _NOTHING if node in gone else node
    if isinstance(node, list):
        kept = [_pruned(child, gone) for child in node]
        return kept if not node or any(k is not _NOTHING for k in kept) else _NOTHING
    if "$tuple" in node:
        kept = _pruned(node["$tuple"], gone)
        return _NOTHING if kept is _NOTHING else {"$tuple": kept}
    if "$record" in node:
        pairs = [[key, _pruned(child, gone)] for key, child in node["$record"]]
        left = [pair for pair in pairs if pair[1] is not _NOTHING]
        return {"$record": left} if left or not pairs else _NOTHING
    return node


def said(gone: Sequence[str]) -> list[Finding]:
    """What the report says of what was left out."""
    if not gone:
        return []
    return [Finding("note", "excluded", f"left out as asked: {_listed([quote(n) for n in gone], 'tensors')}")]


def refuse(reasons: Sequence[str], container: str) -> None:
    """Refuse a conversion for all the reasons there are, if any."""
    if len(reasons) == 1:
        raise ValueRefusedError(reasons[0] + ("" if "was asked for" in reasons[0] else " (exclude= leaves it out)"))
    if reasons:
        listed = "; ".join(reasons[:MOST]) + (f"; and {len(reasons) - MOST} more" if len(reasons) > MOST else "")
        raise ValueRefusedError(
            f"{len(reasons)} tensors cannot be stored in {container} (exclude= leaves tensors out): {listed}"
        )


def _listed(words: Sequence[str], what: str) -> str:
    more = f" and {len(words) - MOST} more" if len(words) > MOST else ""
    return (f"{len(words)} {what}: " if len(words) > 1 else "") + ", ".join(words[:MOST]) + more
