"""`apsi warm`: compile every kernel ahead of its first use."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(commands: Any) -> None:
    """Register the command."""
    p = commands.add_parser(
        "warm",
        help="compile all kernels into the cache, so that the first use is fast",
        description="Compile every Numba kernel into its on-disk cache (once per machine and version).",
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile with a progress bar on stderr."""
    from tqdm.auto import tqdm

    from ..kernels.warm import warm

    with tqdm(unit="kernel", file=sys.stderr) as bar:

        def step(done: int, total: int, name: str) -> None:
            bar.total, bar.n = total, done
            bar.set_postfix_str(name)

        warm(progress=step)
    return 0
