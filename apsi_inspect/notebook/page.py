"""`report`: everything that can be said of a model as one HTML page that needs no network, no script and no kernel.

Contract: the page is made of the same parts and plots as the notebook's views, all text of the file escaped; its policy
forbids scripts and loading; the same model gives the same page. What was not looked at is said. `tests/test_page.py`
enforces this.
"""

from __future__ import annotations

import html
import os
from typing import TYPE_CHECKING, Any

from ..atomic import write_bytes
from ..errors import ValueRefusedError, visible
from ..model import ModelFile
from ..ops.error import quant_error
from ..ops.error_table import ErrorTable
from ..ops.open import open as open_model
from ..ops.scan import scan
from ..ops.survey import stats
from ..parts import Stack, Text
from ..parts_html import block, style_sheet
from . import plots
from .render_stats import CORE, statistics_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..model import Tensor

VALUES_LIMIT, ERRORS_LIMIT = 1 << 30, 256 << 20  # bytes of data that are read unasked
_ROWS, _PICTURES = 200, 3
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem }}
h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #8886; padding-bottom: .2rem }}
nav a {{ margin-right: 1rem }} img {{ margin: .8rem 0 }} #values img {{ max-width: 49% !important }}
{style}</style></head><body class="apsi"><nav aria-label="Contents">{contents}</nav>
{body}
</body></html>
"""


def report(
    model: ModelFile | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    values: bool | None = None,
    errors: bool | str | Sequence[str] | ErrorTable | None = None,
    key: bool | bytes | str | None = None,
    progress: bool | None = None,
) -> str:
    """Write a page about a model that can be sent to somebody who has none of this.

    Parameters
    ----------
    model
        An opened model, or a path.
    path
        The HTML file; replaced where it is there.
    values
        Read all values: digests, statistics, histograms of the largest tensors. None: where they are at most 1 GiB.
    errors
        What quantizing would cost: False, True (the default formats), formats as in `quant_error`, or its result.
        None: where the values are read and are at most 256 MiB.
    key
        Check the signature with this key; it does not get into the page.
    progress
        As in `quant_error`.

    Returns
    -------
    str
        `path`.

    Raises
    ------
    ValueRefusedError
        `path` does not end in .html.
    OSError, ModelFileError
        As `open`.
    """
    target = os.fsdecode(path)
    if not target.lower().endswith((".html", ".htm")):
        raise ValueRefusedError(f"{visible(target)}: a report is an HTML page, its name ends in .html")
    if not isinstance(model, ModelFile):
        with open_model(model) as opened:
            return report(opened, path, values=values, errors=errors, key=key, progress=progress)
    nbytes = sum(map(int, model.columns.sizes))
    wanted = nbytes <= VALUES_LIMIT if values is None else values
    sections = [("Model", block(model._parts())), *_trust(model, wanted, key), *_values(model, wanted, progress)]
    if errors is None:
        errors = wanted and nbytes <= ERRORS_LIMIT
    sections += _errors(model, errors, progress)
    write_bytes(target, _page(os.path.basename(model.path), sections).encode(), durable=False)
    return target


def _page(name: str, sections: Sequence[tuple[str, str]]) -> str:
    ids = [title.lower().replace(" ", "-") for title, _ in sections]
    links = "".join(f'<a href="#{i}">{html.escape(t)}</a>' for i, (t, _) in zip(ids, sections, strict=True))
    parts = (
        f'<section id="{i}"><h2>{html.escape(t)}</h2>{b}</section>' for i, (t, b) in zip(ids, sections, strict=True)
    )
    title = html.escape(visible(name))
    return _PAGE.format(title=title, style=style_sheet(), contents=links, body="\n".join(parts))


def _said(text: str) -> str:
    return block(Text(text, "muted"))


def _trust(model: ModelFile, wanted: bool, key: bool | bytes | str | None) -> Iterator[tuple[str, str]]:
    if wanted or key is not None:
        yield "Integrity", block(model.verify(key)._parts())
    else:
        yield "Integrity", _said("Digests were not checked: that reads all data (values=True).")
    if os.path.exists(model.path):
        yield "Safety", block(scan(model.path)._parts())


def _values(model: ModelFile, wanted: bool, progress: bool | None) -> Iterator[tuple[str, str]]:
    if not wanted:
        yield "Values", _said("The values were not read (values=True).")
        return
    if not len(model):
        return
    table = stats(model, progress=progress)
    frame = table.sort("nbytes", descending=True).frame
    more = f"{len(frame) - _ROWS} smaller tensors" if len(frame) > _ROWS else ""
    shown = statistics_table(frame.head(_ROWS), ("name", "encoding", "numel", *CORE), more)
    pictures = "".join(picture for t in _largest(model, frame) for picture in _pictures(t))
    yield "Values", block(shown) + pictures


def _largest(model: ModelFile, frame: Any) -> list[Tensor]:
    tensors = (model[n] for n in frame["name"])
    found = (t for t in tensors if t.numel > 1 and t.info.encoding.kind in ("float", "block", "scaled"))
    return [t for t, _ in zip(found, range(_PICTURES), strict=False)]


def _pictures(tensor: Tensor) -> Iterator[str]:
    yield plots.figure_html(plots.value_histogram(tensor))
    if tensor.info.encoding.kind in ("block", "scaled"):
        yield plots.figure_html(plots.scale_distribution(tensor))


def _errors(
    model: ModelFile, errors: bool | str | Sequence[str] | ErrorTable, progress: bool | None
) -> Iterator[tuple[str, str]]:
    if errors is False:
        return
    if not isinstance(errors, ErrorTable):
        errors = quant_error(model, None if errors is True else errors, progress=progress)
    body = block(Stack([errors._parts()]))
    if any(row.good for row in errors.rows):
        body += plots.figure_html(plots.error_vs_size(errors))
    yield "Quantization error", body
