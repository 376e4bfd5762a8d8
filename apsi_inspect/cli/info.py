"""`apsi model info PATH…`: what is in model files, from their headers."""

from __future__ import annotations

import sys

from ..errors import ApsiError, ValueRefusedError, visible
from ..remote_url import masked
from .documents import show, unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    p = verbs.add_parser(
        "info",
        help="what is in a model file: tensors, types, metadata (headers only)",
        description="Show what is in model files. Only headers are read, whatever the size. "
        "PATH is a .safetensors, .gguf, .apsim, PyTorch or ONNX file, an index (*.index.json), a folder, or the URL of "
        "a file (https://, hf://, s3://, …).",
    )
    p.add_argument("paths", nargs="+", metavar="PATH")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout (a list for several PATHs)")
    p.add_argument("--tensors", metavar="GLOB", help="list only tensors whose name matches, e.g. 'blk.0.*'")
    p.add_argument("--sort", metavar="COLUMN", help="order by a column: name, nbytes, numel, bpw …; -nbytes descends")
    p.add_argument("--metadata", action="store_true", help="show all metadata, untruncated in number")
    p.add_argument("--tree", action="store_true", help="show the tree of names, repeated blocks folded")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts of each file; 3 where any could not be read."""
    documents: list[Any] = []
    failed = False
    for path in args.paths:
        try:
            documents.append(_one(path, args, first=not documents))
        except ValueRefusedError as exc:
            print(f"apsi: {exc}", file=sys.stderr)
            return 2
        except BrokenPipeError:  # our reader has gone, not the file's
            raise
        except (ApsiError, OSError) as exc:
            sys.stdout.flush()
            print(f"apsi: {say(path, exc)}", file=sys.stderr)
            if args.json:
                documents.append(unreadable(path, say(path, exc)))
            failed = True
    if args.json:
        show(documents, args.paths)
    return 3 if failed else 0


def say(path: str, exc: ApsiError | OSError) -> str:
    if isinstance(exc, OSError) and exc.strerror and not isinstance(exc, ApsiError):
        return f"{visible(masked(path))}: {exc.strerror}"
    return str(exc)


def _one(path: str, args: argparse.Namespace, first: bool) -> Any:
    from ..ops.open import open as open_model

    with open_model(path) as model:
        if args.json:
            from ..ops.info import info_of

            return info_of(model, args.tensors, args.sort)
        from ..notebook.render import model_parts
        from ..parts import to_text
        from .terminal import colour, width

        text = to_text(
            model_parts(model, args.tensors, args.sort, args.metadata, args.tree),
            width=width(),
            color=colour(sys.stdout),
        )
        print(text if first else "\n" + text)
        return True
