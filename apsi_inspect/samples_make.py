"""The generated samples, put together byte by byte: GGUF, PyTorch and ONNX without any library, .apsim by `save_model`.

The same bytes on every machine. `tests/test_samples.py` opens them with gguf, torch, onnx and safetensors.
"""

from __future__ import annotations

import struct

from .atomic import write_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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


def gguf(target: str) -> None:
    """A llama of two layers with random weights, in the mixture of types that real files have."""
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
    write_bytes(target, header + bytes(-len(header) % 32) + b"".join(data), durable=False)


def _floats(count: int, seed: int) -> bytes:
    """float32 numbers between -1 and 1."""
    return struct.pack(f"<{count}f", *((b - 127.5) / 127.5 for b in _noise(count, seed)))


def apsim(target: str) -> None:
    """A fitted oscillator: constants with units, a measured series, and a small network of int8 weights."""
    import numpy as np

    from .ops.quantize import quantize
    from .ops.save import save_model

    t = np.arange(200, dtype=np.float64) / 100
    weights = np.frombuffer(_floats(64 * 16, 11), np.float32).reshape(16, 64)
    params = {
        "oscillator": {
            "mass": _quantity(np.float64(0.25), "kg"),
            "stiffness": _quantity(np.float64(40.0), "N/m"),
            "damping": _quantity(np.float64(0.3), "kg/s"),
            "temperature": _quantity(np.float64(21.5), "degC"),
        },
        "series": {
            "time": _quantity(t, "s"),
            "position": _quantity(np.frombuffer(_floats(200, 12), np.float32), "mm"),
        },
        "network": [
            {"weight": quantize(weights, "int8"), "bias": np.zeros(16, np.float32)},
            {"weight": np.frombuffer(_floats(16, 13), np.float32).reshape(1, 16), "bias": np.zeros(1, np.float32)},
        ],
    }
    save_model(target, params, metadata={"title": "fitted oscillator", "samples": 200}, durable=False)


def _quantity(value: Any, symbol: str) -> Any:
    from .units_pint import pint_units, unit_named

    units, _ = pint_units(unit_named(symbol))
    return units._REGISTRY.Quantity(value, units)


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"


def _dict(**values: bytes) -> bytes:
    return b"}(" + b"".join(_text(k) + v for k, v in values.items()) + b"u"


def _torch_tensor(key: str, numel: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """A call of `torch._utils._rebuild_tensor_v2` over a storage of float32, as `torch.save` writes it."""
    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text(key) + _text("cpu") + _integer(numel) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = storage + _integer(0) + _numbers(shape) + _numbers(stride) + b"\x89" + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def checkpoint(target: str) -> None:
    """A training checkpoint as `torch.save` writes it: tied weights, an optimizer's state, and a Namespace."""
    import io
    import zipfile

    model = {
        "encoder.weight": _torch_tensor("0", 512, (16, 32), (32, 1)),
        "encoder.bias": _torch_tensor("1", 16, (16,), (1,)),
        "decoder.weight": _torch_tensor("0", 512, (32, 16), (1, 32)),  # tied: the transposed view of the encoder's
    }
    optimizer = _dict(lr=b"G" + struct.pack(">d", 0.001), momentum=_torch_tensor("2", 512, (16, 32), (32, 1)))
    options = b"cargparse\nNamespace\n)R" + _dict(batch=_integer(32), device=_text("cpu")) + b"b"
    pickle = b"\x80\x02" + _dict(model=_dict(**model), optimizer=optimizer, epoch=_integer(3), args=options) + b"."
    members = {
        "data.pkl": pickle,
        "byteorder": b"little",
        "data/0": _floats(512, 21),
        "data/1": _floats(16, 22),
        "data/2": _floats(512, 23),
        "version": b"3\n",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(f"tiny-checkpoint/{name}", (1980, 1, 1, 0, 0, 0)), data)
    write_bytes(target, out.getvalue(), durable=False)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def _field(number: int, value: int | bytes | str) -> bytes:
    """A protobuf field: integers as varints, text and messages with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def _initializer(name: str, dims: tuple[int, ...], kind: int, raw: bytes) -> bytes:
    """TensorProto in GraphProto.initializer; kinds: 1 float32, 3 int8."""
    parts = [*(_field(1, d) for d in dims), _field(2, kind), _field(8, name), _field(9, raw)]
    return _field(5, b"".join(parts))


def _node(kind: str, inputs: str, output: str) -> bytes:
    return _field(1, b"".join([*(_field(1, i) for i in inputs.split()), _field(2, output), _field(4, kind)]))


def _value(number: int, name: str, *dims: int) -> bytes:
    """ValueInfoProto of a float32 tensor as GraphProto.input (11) or output (12)."""
    shape = b"".join(_field(1, _field(1, d)) for d in dims)
    return _field(number, _field(1, name) + _field(2, _field(1, _field(1, 1) + _field(2, shape))))


def onnx(target: str) -> None:
    """A network of two layers; the first one's weights are int8 with a scale and a zero point (QDQ)."""
    graph = [
        _node("DequantizeLinear", "first.weight_q first.scale first.zero", "first.weight"),
        _node("MatMul", "x first.weight", "a"),
        _node("Relu", "a", "b"),
        _node("MatMul", "b second.weight", "y"),
        _field(2, "tiny-network"),
        _initializer("first.weight_q", (8, 16), 3, bytes(_noise(128, 31))),
        _initializer("first.scale", (), 1, struct.pack("<f", 0.0078125)),
        _initializer("first.zero", (), 3, b"\x02"),
        _initializer("second.weight", (16, 4), 1, _floats(64, 32)),
        _value(11, "x", 1, 8),
        _value(12, "y", 1, 4),
    ]
    note = _field(14, _field(1, "author") + _field(2, "apsi_inspect samples"))
    head = _field(1, 9) + _field(2, "apsi_inspect") + _field(7, b"".join(graph))
    write_bytes(target, head + _field(8, _field(2, 19)) + note, durable=False)
