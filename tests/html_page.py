"""What a browser would show of a page: its words, tags and attributes (standard library only)."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

# drawn in text only: bars, rules, separators
_DECORATION = str.maketrans(dict.fromkeys("█▏▎▍▌▋▊▉─·│", " "))


class Page(HTMLParser):
    """Tags, attributes, and the text outside of `style` and `script`."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.shown: list[str] = []
        self.live: list[str] = []
        self.open: list[str] = []
        self.code_only: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.live.append(data)
            return
        self.shown.append(data)
        if not {"code", "pre"} & set(self.open):
            self.code_only.append(data)

    @property
    def text(self) -> str:
        """The shown text, its pieces joined as a browser joins them."""
        return "".join(self.shown)


def words(text: str) -> Counter[str]:
    """The words of a text without its drawing characters."""
    return Counter(text.translate(_DECORATION).split())


def html_words(html: str) -> Counter[str]:
    """The words of a page; the edges of cells separate words."""
    for edge in ("</td>", "</th>", "</caption>", "</summary>", "</div>", "</dt>", "</dd>", "</pre>"):
        html = html.replace(edge, edge + " ")
    return words(Page(html).text)
