"""What the tensor browser of `explore()` shows: a filter, an order, a page, a folded tree and a selection.

No widget here. Of 100 000 tensors the columns are read once, each order is computed once, and only the rows of one page
are made; a tree level is grouped when it is opened. `tests/test_state_tensors.py` enforces the contract.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ValueRefusedError, quote
from ..listing import Row, glob, natural_key
from .state_pages import Pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..model import ModelFile

PAGE = 100  # rows of a page
SORTS = ("name", "file order", "bytes", "elements", "bits per weight", "encoding")
_COLUMNS = {"bytes": "nbytes", "elements": "numel", "bits per weight": "bpw", "encoding": "encoding"}
ANY = "all"


class Node(NamedTuple):
    """A line of the tree that can be seen.

    Attributes
    ----------
    path
        Name components from the root, joined by dots; of a leaf the tensor's name.
    label
        The last of them (several, where a group has a single child).
    members
        Positions of the tensors below it, in natural order.
    leaf
        True for a tensor.
    opened
        Whether the lines below follow.
    """

    path: str
    label: str
    depth: int
    members: NDArray[np.int64]
    leaf: bool
    opened: bool


class TensorListState:
    """The tensors of a model as a list or a tree, filtered and ordered, a page at a time.

    Attributes
    ----------
    search
        A part of a name (any case), or a glob where it has ``*``, ``?`` or ``[``; "" shows all.
    encoding
        Only tensors of this encoding; `ANY`: of every one.
    sort, descending
        One of `SORTS`, and its direction.
    as_tree
        Whether `page_nodes` or `page_rows` is shown.
    opened
        Paths of the groups that are open.
    selected
        Name of the chosen tensor; None: none.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.search, self.encoding, self.sort, self.descending = "", ANY, "name", False
        self.as_tree = False
        self.opened: set[str] = set()
        self.selected: str | None = None
        self.pages = Pages(PAGE)
        self._names = list(model.columns.names)
        self._lower: list[str] | None = None
        self._orders: dict[str, NDArray[np.int64]] = {}
        self._children: dict[str, list[Node]] = {}
        self._nodes: list[Node] | None = None
        self._recount()

    @cached_property
    def encodings(self) -> list[str]:
        """The encodings that occur, after `ANY`."""
        c = self.model.columns
        return [ANY, *sorted({c.encodings[i].name for i in set(c.codes)})]

    @cached_property
    def frame(self) -> Any:
        """The tensor table (pandas), in file order."""
        from ..table import TensorTable

        return TensorTable.of(self.model).frame

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        import numpy as np

        return np.asarray(self.model.columns.sizes, np.int64)

    def set_filter(self, search: str | None = None, encoding: str | None = None) -> None:
        """Keep only some tensors; None leaves that part of the filter as it is. Back to the first page.

        Raises
        ------
        ValueRefusedError
            No tensor has this encoding.
        """
        if encoding is not None and encoding not in self.encodings:
            raise ValueRefusedError(f"no tensor is stored as {quote(encoding)}; there are {', '.join(self.encodings)}")
        self.search = self.search if search is None else search.strip()
        self.encoding = self.encoding if encoding is None else encoding
        self._recount()

    def set_sort(self, sort: str | None = None, descending: bool | None = None) -> None:
        """Order the list; the tree stays in natural order.

        Raises
        ------
        ValueRefusedError
            Not one of `SORTS`.
        """
        if sort is not None and sort not in SORTS:
            raise ValueRefusedError(f"cannot sort by {quote(sort)}; known: {', '.join(SORTS)}")
        self.sort = self.sort if sort is None else sort
        self.descending = self.descending if descending is None else descending
        self._recount()

    def show_tree(self, as_tree: bool) -> None:
        """Show the tree (a lone group opened), or the list."""
        self.as_tree = as_tree
        if as_tree and len(self.nodes()) == 1 and not self.nodes()[0].leaf:
            self.toggle(self.nodes()[0].path)
        self._resize()

    def select(self, name: str | None) -> None:
        """Choose a tensor.

        Raises
        ------
        TensorNotFoundError
            There is none of that name.
        """
        if name is not None:
            self.model[name]
        self.selected = name

    def toggle(self, path: str) -> None:
        """Open a group of the tree, or close it."""
        self.opened ^= {path}
        self._nodes = None
        self.pages.resize(len(self.nodes()), keep=True)

    @property
    def count(self) -> int:
        """How many tensors the filter keeps."""
        return len(self.shown)

    def page_rows(self) -> list[Row]:
        """The rows of the page (roles are not told)."""
        span = self.pages.span
        return [self._row(int(i)) for i in self.shown[span.start : span.stop]]

    def page_nodes(self) -> list[Node]:
        """The lines of the tree on the page."""
        span = self.pages.span
        return self.nodes()[span.start : span.stop]

    def nodes(self) -> list[Node]:
        """All lines of the tree that can be seen: the groups that are open, and what is in them."""
        if self._nodes is not None:
            return self._nodes
        out: list[Node] = []
        stack = self._below("", 0, self._kept("name"))[::-1]
        while stack:
            node = stack.pop()
            out.append(node)
            if node.opened:
                stack += self._below(node.path, node.depth + 1, node.members)[::-1]
        self._nodes = out
        return out

    def nbytes(self, members: NDArray[np.int64]) -> int:
        """Stored bytes of some tensors."""
        return int(self._sizes[members].sum())

    def _recount(self) -> None:
        self._children, self._nodes = {}, None
        wanted = self._matching()
        order = self._order(self.sort)
        shown = order if wanted is None else order[wanted[order]]
        self.shown: NDArray[np.int64] = shown[::-1] if self.descending else shown
        self._wanted = wanted
        self._resize()

    def _resize(self) -> None:
        self.pages.resize(len(self.nodes()) if self.as_tree else len(self.shown))

    def _kept(self, sort: str) -> NDArray[np.int64]:
        order = self._order(sort)
        return order if self._wanted is None else order[self._wanted[order]]

    def _matching(self) -> NDArray[np.bool_] | None:
        """Which tensors the filter keeps; None: all."""
        import numpy as np

        keep: NDArray[np.bool_] | None = None
        if self.search:
            keep = np.fromiter(map(self._matcher(), self._searched()), bool, len(self._names))
        if self.encoding != ANY:
            c = self.model.columns
            codes = [i for i, e in enumerate(c.encodings) if e.name == self.encoding]
            stored = np.isin(np.asarray(c.codes, np.int64), codes)
            keep = stored if keep is None else keep & stored
        return keep

    def _is_glob(self) -> bool:
        return any(c in self.search for c in "*?[")

    def _searched(self) -> Sequence[str]:
        if self._is_glob():
            return self._names
        if self._lower is None:
            self._lower = [n.lower() for n in self._names]
        return self._lower

    def _matcher(self) -> Any:
        if self._is_glob():
            match = glob(self.search)
            return lambda name: match(name) is not None
        part = self.search.lower()
        return lambda name: part in name

    def _order(self, sort: str) -> NDArray[np.int64]:
        """Positions in ascending order, computed once; equal ones in natural order of their names."""
        import numpy as np

        if sort not in self._orders:
            names = self._names
            if sort == "file order":
                order = np.arange(len(names))
            elif sort == "name":
                keys = [natural_key(n) for n in names]
                order = np.array(sorted(range(len(names)), key=keys.__getitem__), np.int64)
            else:
                base = self._order("name")
                values = self.frame[_COLUMNS[sort]]
                column = values.astype(str).to_numpy() if sort == "encoding" else values.to_numpy()
                order = base[np.argsort(column[base], kind="stable")]
            self._orders[sort] = order
        return self._orders[sort]

    def _row(self, i: int) -> Row:
        info = self.model.info(i)
        numel, q = 1, info.qparams or info.affine
        for n in info.shape:
            numel *= n
        bpw = 8 * info.nbytes / numel if numel else 0.0
        unit = str(info.unit) if info.unit is not None else ""
        axis, block = (q.axis, q.block) if q else (None, None)
        return Row(
            info.name, info.encoding.name, info.shape, numel, info.nbytes, bpw, info.offset, "", unit, axis, block, ""
        )

    def _below(self, path: str, depth: int, members: NDArray[np.int64]) -> list[Node]:
        """The lines directly below a group; groups of one child are drawn as one line."""
        known = self._children.get(path)
        if known is None:
            known = self._children[path] = self._grouped(path, depth, members)
        return [n._replace(opened=not n.leaf and n.path in self.opened) for n in known]

    def _grouped(self, path: str, depth: int, members: NDArray[np.int64]) -> list[Node]:
        import numpy as np

        at = len(path) + 1 if path else 0
        # a name that ends here is a leaf by itself, also where a group has the same label
        keys = [_key(self._names[i], at) for i in members]
        starts = _runs(keys)
        if len(starts) - 1 > len(set(keys)):  # natural order set apart what belongs together (blk.1, blk-a, blk.2)
            first: dict[Any, int] = {}
            order = sorted(range(len(keys)), key=lambda j: first.setdefault(keys[j], j))
            members, keys = members[np.array(order)], [keys[j] for j in order]
            starts = _runs(keys)
        out = []
        for a, z in pairwise(starts):
            name = self._names[members[a]]
            if not keys[a][1]:
                out += [
                    Node(self._names[i], self._names[i][at:], depth, members[a:z], True, False) for i in members[a:z]
                ]
                continue
            inner = self._single(name[: at + len(keys[a][0])], members[a:z])
            label = inner[at:]
            out.append(Node(inner, label, depth, members[a:z], inner == name and z - a == 1, False))
        return out

    def _single(self, path: str, members: NDArray[np.int64]) -> str:
        """The path extended while all members agree on the next component; of a lone tensor its whole name."""
        first: str = self._names[members[0]]
        if len(members) == 1:
            return first
        last = [self._names[i] for i in members]
        while True:
            part, dot, _ = first[len(path) + 1 :].partition(".")
            longer = f"{path}.{part}."
            if not dot or not all(n.startswith(longer) for n in last):
                return path
            path = longer[:-1]


def _key(name: str, at: int) -> tuple[str, bool]:
    """The component of a name that starts at `at` and whether others follow; of the last one the whole name."""
    part, dot, _ = name[at:].partition(".")
    return (part, True) if dot else (name, False)


def _runs(keys: Sequence[Any]) -> list[int]:
    """Where runs of equal keys start, and the end."""
    starts = [j for j in range(len(keys)) if not j or keys[j] != keys[j - 1]]
    return [*starts, len(keys)]
