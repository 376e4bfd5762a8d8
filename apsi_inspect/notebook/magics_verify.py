"""``%apsi_verify PATH``: `verify` in a line; returns the report. Errors come as one line without a traceback.

A secret never stands in the line, since a notebook keeps it: it comes from a prompt, an environment variable or a file.
`tests/test_magics_verify.py` runs it in an `InteractiveShell`.
"""

# IPython's decorators have no types
# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import os

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ..errors import visible
from .magics import one_line_errors, one_path, silenced, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..reports import Report


@magics_class
class VerifyMagics(Magics):
    """The magic of `verify`."""

    @magic_arguments()
    @argument("path", nargs="*", metavar="PATH", help="a model file or the index of a sharded checkpoint")
    @argument("--user-key", action="store_true", help="the per-user key of this machine must have signed it")
    @argument("--ask-key", action="store_true", help="ask for the shared secret (it is not kept in the notebook)")
    @argument("--key-env", metavar="VARIABLE", help="the shared secret is in an environment variable")
    @argument("--key-file", metavar="FILE", help="the key is the content of a file")
    @argument("--full", action="store_true", help="also take the digest of the whole data in one stream")
    @line_magic
    def apsi_verify(self, line: str) -> Report | None:
        """Check digests and signature of a model file; returns the report: ``r = %apsi_verify model.apsim``.

        Without a key, digests show damage and not authorship. A path with spaces stands in quotes; ``~`` and
        ``$variable`` are expanded. A semicolon at the end shows nothing.
        """
        words = split(line)
        if "--help" in words:
            return print(self.apsi_verify.parser.format_help())
        args = self.apsi_verify.parser.parse_args(words)
        paths = one_path(args.path)
        if not paths:
            raise UsageError("which file? %apsi_verify PATH")
        with one_line_errors():
            report = _verify(os.path.expanduser(paths[0]), _key(args), args.full)
        return None if silenced(self.shell, line) else report


def _key(args: Any) -> bool | bytes | str | None:
    given = [w for w in ("user_key", "ask_key", "key_env", "key_file") if getattr(args, w)]
    if len(given) > 1:
        raise UsageError(f"one key at most: {', '.join('--' + w.replace('_', '-') for w in given)}")
    if args.ask_key:
        from getpass import getpass

        return getpass("Secret: ")
    if args.key_env:
        secret = os.environ.get(args.key_env)
        if not secret:
            raise UsageError(f"the key is empty: environment variable {visible(args.key_env)} is not set")
        return secret
    if args.key_file:
        from ..integrity.signing import key_of_file

        return key_of_file(os.path.expanduser(args.key_file))
    return True if args.user_key else None


def _verify(path: str, key: bool | bytes | str | None, full: bool) -> Report:
    from tqdm.auto import tqdm

    from ..ops.verify import verify

    bar: Any = tqdm(unit="B", unit_scale=True, leave=False, delay=0.5)

    def step(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        return verify(path, key, full, progress=step)
