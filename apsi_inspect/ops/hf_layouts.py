"""What llama.cpp's converters do to names and values between the Hugging Face form of a model and its GGUF.

Contract: tables and formulas only, after `conversion/*.py` of llama.cpp; the names are those of the `gguf`
package's `TensorNameMap`. `tests/test_align.py` compares with that package and with the published formulas.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..model import ModelFile

# Architectures whose converters permute the rows of q and k (`LlamaModel.permute`; `undo_permute`).
PERMUTED = frozenset(
    (
        "llama", "arcee", "arctic", "bailingmoe", "chameleon", "deci", "deepseek", "granite", "granitehybrid",
        "granitemoe", "llada", "llama-embed", "minicpm", "mistral3", "nanbeige", "olmo", "smollm3",
    )
)  # fmt: skip
# Architectures whose converters add 1 to the weights of norms.
SHIFTED = frozenset(("gemma", "gemma2", "gemma3", "nemotron"))
# Architectures whose converters transpose the matrices of Conv1D layers, and their endings.
TRANSPOSED = dict.fromkeys(("gpt2", "jais"), (".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
# Tensors of a Hugging Face model that no GGUF has (`ModelBase.prepare_tensors`, `BertModel.filter_tensors`) …
LEFT_OUT = (
    ".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias",
    "position_ids", "pooler.dense.weight", "pooler.dense.bias",
)  # fmt: skip
# … and of a GGUF that no Hugging Face model has.
MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_SUFFIXES = (".weight", ".bias")
_OLD = {".gamma": ".weight", ".beta": ".bias"}  # of the norms of BERT's first checkpoints
_Q_OR_K = re.compile(r"blk\.(\d{1,6})\.attn_([qk])\.(?:weight|bias)")
_BLOCK = re.compile(r"(?:^|\.)blk\.0\.")


class Layout(NamedTuple):
    """How values of the Hugging Face form stand in the GGUF.

    Attributes
    ----------
    side
        ``"a"`` or ``"b"``: the model that has the Hugging Face form.
    heads
        The rows of so many heads are permuted: those of a head, ``(2, n/2)``, come as ``(n/2, 2)``; 0: they are not.
    shift
        Added to every value.
    transposed
        The GGUF has the transposed matrix.
    """

    side: str
    heads: int = 0
    shift: float = 0.0
    transposed: bool = False

    @property
    def words(self) -> str:
        """What was done, for people."""
        if self.heads:
            return f"rows permuted ({self.heads} heads)"
        return f"{self.shift:g} added" if self.shift else "transposed in GGUF"


class Facts(NamedTuple):
    """What a model with GGUF keys says of its architecture; head counts are one for all blocks or one a block."""

    arch: str
    heads: Any
    kv_heads: Any

    def table(self) -> Callable[[str], str | None] | None:
        """A function from Hugging Face names to GGUF's; None where the gguf package is not installed."""
        try:
            import gguf
        except ModuleNotFoundError:
            return None
        arch = next((k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self.arch), None)
        if arch is None:
            return lambda name: None
        names = gguf.get_tensor_name_map(arch, 1)

        def find(name: str) -> str | None:
            for old, new in _OLD.items():
                name = name.removesuffix(old) + new if name.endswith(old) else name
            parts = name.split(".")
            for i, part in enumerate(parts):
                if part.isascii() and part.isdecimal():  # the number of the block is the first one
                    zero = ".".join([*parts[:i], "0", *parts[i + 1 :]])
                    found = names.get_name(zero, try_suffixes=_SUFFIXES)
                    at = _BLOCK.search(found) if found else None
                    if found is None or (at is None and int(part[:20])):
                        return None
                    return found if at is None else f"{found[: at.end() - 2]}{part}.{found[at.end() :]}"
            found = names.get_name(name, try_suffixes=_SUFFIXES)
            return found if found is None or not _BLOCK.search(found) else None

        return find

    def heads_of(self, gguf_name: str) -> int:
        """How many heads the rows of a q or k matrix or bias belong to; 0 for any other tensor."""
        found = _Q_OR_K.fullmatch(gguf_name)
        if found is None:
            return 0
        value = self.kv_heads if found[2] == "k" and self.kv_heads is not None else self.heads
        if isinstance(value, list):
            block = int(found[1])
            value = value[block] if block < len(value) else 0
        return value if isinstance(value, int) and value > 0 else 0


def facts_of(model: ModelFile) -> Facts | None:
    """The GGUF keys of a model (also of one that was converted from GGUF); None where it names no architecture."""
    arch = model.metadata.get("general.architecture")
    if not isinstance(arch, str):
        return None
    keys = (f"{arch}.attention.head_count", f"{arch}.attention.head_count_kv")
    return Facts(arch, *(_number(model.metadata.get(k)) for k in keys))


def _number(value: Any) -> Any:
    """An int or a list of ints, from a value of GGUF or its text in another container."""
    if isinstance(value, str):
        try:
            value = json.loads(value[:10_000])
        except ValueError:
            return None
    if isinstance(value, int):
        return value
    if value is None or isinstance(value, (str, float, dict)):
        return None
    return [int(v) for v in value[:10_000]]


def layout_of(name: str, gguf_name: str, facts: Facts, side: str) -> Layout | None:
    """What a converter does to a tensor; None: nothing."""
    heads = facts.heads_of(gguf_name) if facts.arch in PERMUTED else 0
    if heads:
        return Layout(side, heads)
    if facts.arch in SHIFTED and name.endswith("norm.weight"):
        return Layout(side, shift=1.0)
    if name.endswith(TRANSPOSED.get(facts.arch, ())):
        return Layout(side, transposed=True)
    return None
