"""Pages of a long list: which of its items are shown. `tests/test_state_tensors.py` enforces the bounds."""

from __future__ import annotations


class Pages:
    """A list of `total` items, `size` of them a page.

    Attributes
    ----------
    page
        Number of the page shown, from 0; always one that there is.
    """

    def __init__(self, size: int, total: int = 0) -> None:
        self.size, self.total, self.page = size, total, 0

    @property
    def count(self) -> int:
        """How many pages there are, at least 1."""
        return max(1, -(-self.total // self.size))

    @property
    def span(self) -> range:
        """Positions of the items on the page."""
        start = self.page * self.size
        return range(start, min(start + self.size, self.total))

    def resize(self, total: int, keep: bool = False) -> None:
        """Another list; back to the first page unless `keep`."""
        self.total = total
        self.go(self.page if keep else 0)

    def go(self, page: int) -> None:
        """Show a page, the nearest one that there is."""
        self.page = min(max(page, 0), self.count - 1)

    @property
    def text(self) -> str:
        """``101–200 of 4 321``; ``none``."""
        if not self.total:
            return "none"
        shown = self.span
        total = f"{self.total:,}".replace(",", " ")
        if self.count == 1:
            return f"all {total}" if self.total > 1 else "1"
        return f"{shown.start + 1}–{shown.stop} of {total}"
