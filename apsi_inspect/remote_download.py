"""A file behind a URL, downloaded to a temporary one: for servers that give no ranges.

Contract: the temporary file has no name any more when it is used, so that nothing is left behind whatever happens; a
download stops before the disk is full. `tests/test_remote.py` enforces this.
"""

from __future__ import annotations

import os
import shutil
import tempfile

from .errors import ModelFileError, quote
from .permit import check_read
from .remote import PART, RemoteSource, http_options
from .remote_url import Location, locate
from .source import FileSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, BinaryIO

_SPARE = 256 << 20  # bytes of the disk that a download leaves free


class DownloadedSource(FileSource):
    """A file behind a URL, downloaded to a temporary file that has no name any more and goes with the source."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        place = locate(url)
        self._fd = -1
        check_read(place.shown, url)
        self.url, self.storage_options = url, dict(storage_options or {})
        handle, path = tempfile.mkstemp(prefix="apsi-", suffix=".download")
        try:
            with os.fdopen(handle, "wb") as out:
                _download(place, url, self.storage_options, out)
            super().__init__(path)
        finally:
            os.unlink(path)
        self.name = place.shown

    def _allowed(self) -> None:
        """The URL was asked about; nobody gave a name for the temporary file."""

    def beside(self, name: str) -> DownloadedSource:
        """The file of that name in the same folder, downloaded too."""
        place = Location(self.url, self.name).beside(name)
        return DownloadedSource(place.url, self.storage_options)


def _download(place: Location, url: str, options: Mapping[str, Any], out: BinaryIO) -> None:
    from tqdm.auto import tqdm

    folder = tempfile.gettempdir()
    with tqdm(unit="B", unit_scale=True, desc=place.shown.rpartition("/")[2][:40], delay=1.0, leave=False) as bar:

        def step(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done % (16 << 20) < PART and (total or 0) - done + _SPARE > shutil.disk_usage(folder).free:
                raise ModelFileError(place.shown, f"does not fit on the disk: {quote(folder)} has too little room")

        if place.url.startswith(("http://", "https://")):
            from .remote_ranges import download

            download(place, http_options(place, url, options), out, step)
            return
        with RemoteSource(url, options) as source:
            for begin in range(0, source.size, PART):
                step(begin, source.size)
                out.write(source.view(begin, min(PART, source.size - begin)))
