"""The signature of a model file: verify it with a key, and say the outcome in words.

No widget here. A key is handed to `SignatureState.verify` and lives until that check has ended; the state, its report
and its repr have no place for it. `tests/test_state_views.py` enforces this.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import ValueRefusedError, quote
from ..model import ModelFile
from ..parts import Badge, Stack
from .render import trust
from .render_tensors import code
from .state_job import Job

if TYPE_CHECKING:
    from ..parts import Part
    from ..reports import Report
    from .state_job import Progress

NO_KEY, SECRET, USER_KEY, KEY_FILE = "no key", "secret", "per-user key", "key file"
KINDS = (NO_KEY, SECRET, USER_KEY, KEY_FILE)
SAID = {
    "authentic": "Signed with this key, and every byte is what was signed.",
    "intact": "The bytes are what the file's own digests say. Nobody vouches for them: no key was used.",
    "damaged": "The file is not what was written or signed. Do not use it.",
    "unsigned": "A key was given, but the file carries no signature.",
    "other-key": "Signed, but with another key than this one.",
    "incomplete": "A part of the file or of its shards is missing.",
    "not-checked": "There was nothing to check it with.",
}


class SignatureState:
    """What is known of a file's digests and signature.

    Parameters
    ----------
    model
        An opened model (the files it holds open are checked), or a path.

    Attributes
    ----------
    job
        The check that runs; its result is the `Report`.
    report
        The outcome of the last check; None before.
    """

    def __init__(self, model: ModelFile | str | os.PathLike[str]) -> None:
        self.model = model
        self.job = Job()
        self.report: Report | None = None

    @property
    def path(self) -> str:
        """What is checked."""
        return self.model.path if isinstance(self.model, ModelFile) else os.fsdecode(self.model)

    def verify(self, kind: str = NO_KEY, given: str = "", full: bool = False) -> None:
        """Start a check.

        Parameters
        ----------
        kind
            One of `KINDS`.
        given
            The secret, or the path of the key file; not kept.
        full
            Also take the digest of the whole data where chunks have been checked.

        Raises
        ------
        ValueRefusedError
            The kind is not known, or the key that it needs is not given.
        OSError
            The key file cannot be read.
        """
        key = _key(kind, given)

        def work(progress: Progress) -> Report:
            return self._check(key, full, progress)

        self.report = None
        self.job.start(work)

    def _check(self, key: bool | bytes | str | None, full: bool, progress: Progress) -> Report:
        from ..ops import verify as ops

        if isinstance(self.model, ModelFile):
            self.report = ops.verify_opened(self.model, key, full, progress=progress)
        else:
            self.report = ops.verify(self.model, key, full, progress=progress)
        return self.report

    @property
    def status(self) -> str:
        """The state in a word: of the report, else of the check that runs or failed."""
        if self.report is not None:
            return self.report.status
        return {"running": "checking", "failed": "error", "cancelled": "cancelled"}.get(self.job.status, "not-checked")

    def badge(self) -> Badge:
        """The state in words."""
        if self.report is not None:
            return Badge(self.report.status, SAID.get(self.report.status, self.report.reason))
        if self.job.status in ("running", "failed", "cancelled"):
            said = {"running": f"{100 * self.job.share:.0f} %", "failed": self.job.message}
            return Badge(self.status, said.get(self.job.status, "The check was cancelled; nothing is known."))
        if isinstance(self.model, ModelFile):
            return trust(self.model)
        return Badge("not-checked", "Nothing has been checked yet.")

    def parts(self) -> Part:
        """The badge, and after a check what was checked."""
        head = Stack([code(os.path.basename(self.path)), self.badge()])
        return head if self.report is None else Stack([self.badge(), self.report._parts()])


def _key(kind: str, given: str) -> bool | bytes | str | None:
    if kind not in KINDS:
        raise ValueRefusedError(f"{quote(kind)} is no kind of key; there are {', '.join(KINDS)}")
    if kind == SECRET:
        if not given:
            raise ValueRefusedError("type the secret first")
        return given
    if kind == KEY_FILE:
        if not given.strip():
            raise ValueRefusedError("name the key file first")
        from ..integrity.signing import key_of_file

        return key_of_file(os.path.expanduser(given.strip()))
    return True if kind == USER_KEY else None
