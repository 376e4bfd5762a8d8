"""Small model files to try things on: a real model and its int8 twin that come with the package, and generated ones.

The real ones are the weights of Fracast-0, an Apache-2.0 time-series model of 85 001 parameters. The generated ones are
the same bytes on every machine. `tests/test_samples.py` opens them with independent readers.
"""

from __future__ import annotations

import os
import struct

from .atomic import write_bytes
from .errors import ValueRefusedError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_DATA = os.path.join(os.path.dirname(__file__), "data")
REAL = ("fracast.safetensors", "fracast-int8.safetensors")


def names() -> list[str]:
    """The samples there are."""
    return [*REAL, *_MAKERS]


def path(name: str) -> str:
    """Path of a real sample inside the package.

    Raises
    ------
    ValueRefusedError
        No such sample; the generated ones have no place of their own, `write` makes them.
    """
    if name not in REAL:
        raise ValueRefusedError(
            f"no bundled sample {quote(name)}; bundled: {', '.join(REAL)}; others: samples.write(…)"
        )
    return os.path.join(_DATA, name)


def write(folder: str | os.PathLike[str], only: Iterable[str] | None = None) -> list[str]:
    """Write the samples into a folder (made where it is missing) and return their paths.

    Parameters
    ----------
    folder
        Where to; files of the same names are replaced.
    only
        Some of `names`; None: all.
    """
    wanted = list(names() if only is None else only)
    unknown = [n for n in wanted if n not in names()]
    if unknown:
        raise ValueRefusedError(f"no sample {quote(unknown[0])}; samples: {', '.join(names())}")
    os.makedirs(folder, exist_ok=True)
    paths = []
    for name in wanted:
        target = os.path.join(os.fsdecode(folder), name)
        write_bytes(target, _bundled(name) if name in REAL else _MAKERS[name](), durable=False)
        paths.append(target)
    return paths


def _bundled(name: str) -> bytes:
    with open(path(name), "rb") as f:
        return f.read()


def _noise(count: int, seed: int) -> list[int]:
    """Bytes of a fixed linear congruential sequence (no generator of a library, so no drift between versions)."""
    out, state = [], seed
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        out.append(state >> 16 & 0xFF)
    return out


def _gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _gguf_value(value: object) -> bytes:
    """A typed value: ints as UINT32, floats as FLOAT32, lists by their first element."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _gguf_string(value)
    assert isinstance(value, list)
    first = value[0]
    kind, code = (8, "") if isinstance(first, str) else (6, "f") if isinstance(first, float) else (5, "i")
    body = b"".join(map(_gguf_string, value)) if not code else struct.pack(f"<{len(value)}{code}", *value)
    return struct.pack("<IIQ", 9, kind, len(value)) + body


# encoding -> ggml type id, elements and bytes of a block, position of its float16 scales
_BLOCKS = {
    "F32": (0, 1, 4, ()),
    "Q8_0": (8, 32, 34, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
}
_SCALE = struct.pack("<e", 0.0009765625)


def _gguf_data(encoding: str, numel: int, seed: int) -> bytes:
    _, size, nbytes, scales = _BLOCKS[encoding]
    if encoding == "F32":
        return struct.pack(f"<{numel}f", *(1.0 + (b - 128) / 1024 for b in _noise(numel, seed)))
    data = bytearray(_noise(numel // size * nbytes, seed))
    for block in range(0, len(data), nbytes):
        for at in scales:
            data[block + at : block + at + 2] = _SCALE
    return bytes(data)


def _tiny_llama() -> tuple[dict[str, object], list[tuple[str, tuple[int, ...], str]]]:
    """Metadata and tensors of a llama of two layers, in the mixture of types that real files have."""
    width, ff, vocabulary = 256, 512, 320
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"▁tok{i}" for i in range(61))]
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "general.name": "apsi sample (random weights)",
        "general.license": "cc0-1.0",
        "general.file_type": 15,
        "general.quantization_version": 2,
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": width,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(vocabulary)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 61],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}",
    }
    tensors: list[tuple[str, tuple[int, ...], str]] = [("token_embd.weight", (vocabulary, width), "Q8_0")]
    for i in range(2):
        tensors += [
            (f"blk.{i}.attn_norm.weight", (width,), "F32"),
            (f"blk.{i}.attn_q.weight", (width, width), "Q4_K"),
            (f"blk.{i}.attn_k.weight", (width // 2, width), "Q4_K"),
            (f"blk.{i}.attn_v.weight", (width // 2, width), "Q6_K"),
            (f"blk.{i}.attn_output.weight", (width, width), "Q4_K"),
            (f"blk.{i}.ffn_norm.weight", (width,), "F32"),
            (f"blk.{i}.ffn_gate.weight", (ff, width), "Q4_K"),
            (f"blk.{i}.ffn_up.weight", (ff, width), "Q4_K"),
            (f"blk.{i}.ffn_down.weight", (width, ff), "Q6_K"),
        ]
    return metadata, [*tensors, ("output_norm.weight", (width,), "F32"), ("output.weight", (vocabulary, width), "Q6_K")]


def _gguf() -> bytes:
    metadata, tensors = _tiny_llama()
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_gguf_string(k) + _gguf_value(v) for k, v in metadata.items()]
    data, offset = [], 0
    for seed, (name, shape, encoding) in enumerate(tensors):
        numel = 1
        for d in shape:
            numel *= d
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head.append(_gguf_string(name) + struct.pack("<I", len(shape)) + dims)
        head.append(struct.pack("<IQ", _BLOCKS[encoding][0], offset))
        raw = _gguf_data(encoding, numel, seed + 1)
        raw += bytes(-len(raw) % 32)
        data.append(raw)
        offset += len(raw)
    header = b"".join(head)
    return header + bytes(-len(header) % 32) + b"".join(data)


_MAKERS: dict[str, Callable[[], bytes]] = {"tiny-llama.gguf": _gguf}
