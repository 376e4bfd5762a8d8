"""`apsi plan [PATH]`: the memory and the devices that a model needs, from a file or from a number of parameters.

0 planned, 2 usage (a number is missing or absurd), 3 the model or its config.json cannot be used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

_SHAPE = {
    "layers": "number of layers", "hidden": "width of the model", "heads": "attention heads",
    "kv-heads": "key-value heads (fewer than heads: GQA, 1: MQA)", "head-dim": "length of a head",
    "kv-lora-rank": "latent of MLA", "rope-dim": "rotary part of MLA's key",
    "sliding-window": "of all layers, in tokens",
}  # fmt: skip
_OTHERS = ("parameters", "encodings", "context", "batch", "kv-dtype", "overhead", "shard", "training")


def add_parser(commands: Any) -> None:
    """Register the command."""
    p = commands.add_parser(
        "plan",
        help="the memory and the devices that a model needs",
        description="Memory for weights (per encoding), KV cache (per context), training, and how many devices of a "
        "size hold them, each number with its formula. From the header of PATH and the config.json beside it, or from "
        "--parameters and the shape.",
    )
    p.add_argument("path", nargs="?", metavar="PATH")
    p.add_argument("--parameters", metavar="N", help="instead of PATH: 70B, 1.8T; the weights are then estimates")
    p.add_argument("--config", metavar="FILE", help="the model's config.json (default: the one beside PATH)")
    for name, text in _SHAPE.items():
        p.add_argument(f"--{name}", type=int, metavar="N", help=text)
    p.add_argument("--encodings", metavar="LIST", help="of the weights, like bf16,q8_0,q4_k,int4")
    p.add_argument("--context", default="4096,32768,131072", metavar="LIST", help="tokens (default 4096,32768,131072)")
    p.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at a time (default 1)")
    p.add_argument("--kv-dtype", default="f16", metavar="TYPE", help="of the cache: f16, fp8, q8_0 … (default f16)")
    p.add_argument("--device", default="80GB", metavar="LIST", help="memory of one device: 80GB, 24GiB (default 80GB)")
    p.add_argument("--overhead", type=float, default=0.1, metavar="SHARE", help="of a device kept free (default 0.1)")
    p.add_argument("--shard", default="4GB", metavar="SIZE", help="largest file (default 4GB)")
    p.add_argument("--training", metavar="OPTIMIZER", help="also training: adamw, adamw-8bit, lion, sgd, sgd-momentum")
    p.add_argument("--json", action="store_true", help="one JSON document on stdout")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from ..errors import ApsiError, ValueRefusedError
    from ..ops.hardware import hardware_plan
    from .info import say

    try:
        plan = hardware_plan(
            args.path, parameters=args.parameters, config=args.config,
            **{name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in _SHAPE},
            encodings=None if args.encodings is None else _list(args.encodings),
            context=_numbers(args.context), batch=args.batch, kv_dtype=args.kv_dtype,
            device_memory=_list(args.device) or [args.device], overhead=args.overhead, shard=args.shard,
            training=args.training,
        )  # fmt: skip
    except ValueRefusedError as exc:
        print(f"apsi: {_by_option(str(exc))}", file=sys.stderr)
        return 2
    except (ApsiError, OSError) as exc:
        name = getattr(exc, "filename", None) or args.path or args.config or "apsi plan"
        print(f"apsi: {say(str(name), exc)}", file=sys.stderr)
        return 3
    if args.json:
        import json

        print(json.dumps(plan.to_dict(), ensure_ascii=False, indent=1, allow_nan=False))
        return 0
    from ..parts import to_text
    from .terminal import colour, width

    print(to_text(plan._parts(), width=width(), color=colour(sys.stdout)))
    return 0


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _by_option(message: str) -> str:
    """With the option that was typed where the message begins with the argument's name."""
    name, space, rest = message.partition(" ")
    word, colon = name.rstrip(":"), ":" * name.endswith(":")
    options = {"device_memory": "device", **{n.replace("-", "_"): n for n in (*_SHAPE, *_OTHERS)}}
    return f"--{options[word]}{colon}{space}{rest}" if word in options else message


def _numbers(text: str) -> list[int]:
    from ..errors import ValueRefusedError

    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueRefusedError(f"--context {text!r:.40}: whole numbers like 4096,131072 were expected") from None
