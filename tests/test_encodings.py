"""The registry against safetensors, gguf, ml_dtypes and the ggml library: sizes, names, dtypes."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path

import gguf
import libggml
import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, deserialize

from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.scaled import CODE_DTYPE, PACKING
from apsi_inspect.formats.gguf import FILE_TYPES, TYPES
from apsi_inspect.formats.safetensors import DTYPES

from . import handmade

# What the Python table of gguf 0.19 has and ggml's own structure has not (docs/formats.md, 2.8)
PYTHON_TABLE_IS_WRONG = {"Q8_1": (32, 40)}


def ggml() -> ctypes.CDLL:
    folder = Path(next(iter(libggml.__path__))) / "lib64"
    lib = ctypes.CDLL(str(folder / "libggml-base.so"))
    lib.ggml_type_size.restype = ctypes.c_size_t
    lib.ggml_blck_size.restype = ctypes.c_int64
    lib.ggml_type_name.restype = ctypes.c_char_p
    return lib


def test_every_ggml_type() -> None:
    lib, seen = ggml(), 0
    for i in range(43):
        size, name = lib.ggml_type_size(i), lib.ggml_type_name(i)
        if not size:  # removed from ggml
            assert i not in TYPES
            continue
        encoding = TYPES[i]
        assert (encoding.block_bytes, encoding.block_size) == (size, lib.ggml_blck_size(i)), encoding.name
        assert encoding.name.lower() == name.decode().lower()
        seen += 1
    assert seen == len(TYPES)


def test_gguf_package() -> None:
    for kind, (size, nbytes) in gguf.GGML_QUANT_SIZES.items():
        encoding = TYPES[kind.value]
        assert encoding.name == kind.name
        found = (encoding.block_size, encoding.block_bytes)
        assert found == (size, nbytes) or PYTHON_TABLE_IS_WRONG[kind.name] == (size, nbytes)
    newer = {TYPES[i].name for i in TYPES.keys() - {k.value for k in gguf.GGML_QUANT_SIZES}}
    assert newer == {"Q2_0"}


def test_file_types() -> None:
    for kind in gguf.LlamaFileType:
        if kind.name != "GUESSED":
            words = kind.name.removeprefix("MOSTLY_")
            assert FILE_TYPES[kind.value] == words


@pytest.mark.parametrize("name", DTYPES)
def test_safetensors_knows_the_dtype_and_its_size(name: str) -> None:
    encoding = DTYPES[name]
    raw = bytes(encoding.block_bytes)
    blob = handmade.safetensors([("x", name, [encoding.block_size], raw)])
    ((found, entry),) = deserialize(blob)
    assert (found, entry["dtype"], entry["shape"]) == ("x", name, [encoding.block_size])
    with pytest.raises(SafetensorError):  # one byte more is not that many elements
        deserialize(handmade.safetensors([("x", name, [encoding.block_size], raw + b"\0")]))


def test_dtypes_are_all_of_the_reference() -> None:
    """The reference lists them in the error for an unknown one."""
    with pytest.raises(SafetensorError) as info:
        deserialize(handmade.safetensors([("x", "NONE", [1], b"\0")]))
    listed = str(info.value).partition("expected one of")[2].partition(" at line")[0]
    assert [word.strip(" `") for word in listed.split(",")] == list(DTYPES)


@pytest.mark.parametrize("name", [n for n, e in ENCODINGS.items() if e.kind not in ("block", "scaled")])
def test_plain_dtypes(name: str) -> None:
    encoding = ENCODINGS[name]
    dtype = np.dtype(getattr(ml_dtypes, encoding.dtype, encoding.dtype))
    if encoding.block_size == 1:
        # Two float16, which NumPy has no complex type for, are widened.
        assert dtype.itemsize == (2 if name == "C32" else 1) * encoding.block_bytes
        assert sum(size * count for _, size, count in encoding.swap) in (0, encoding.block_bytes)
        assert bool(encoding.swap) == (encoding.block_bytes > 1)
    else:  # ml_dtypes keeps sub-byte values one a byte
        info = ml_dtypes.iinfo(dtype) if "int" in dtype.name else ml_dtypes.finfo(dtype)
        assert info.bits == encoding.bpw
        assert dtype.itemsize == 1
    if dtype.kind == "V":  # a type of ml_dtypes: NumPy knows no kind of it
        assert encoding.kind == re.match(r"b?(float|u?int)", dtype.name)[1]  # type: ignore[index]
    else:
        assert encoding.kind == {"b": "bool", "i": "int", "u": "uint", "c": "complex", "f": "float"}[dtype.kind]


def test_bits_per_weight() -> None:
    for name, bits in {
        "F32": 32, "F4": 4, "F6_E2M3": 6, "Q4_0": 4.5, "Q6_K": 6.5625, "IQ1_S": 1.5625, "TQ1_0": 1.6875, "Q2_0": 2.25,
        "int4": 4, "fp6": 6, "bf16": 16,
    }.items():  # fmt: skip
        assert ENCODINGS[name].bpw == bits


def test_nbytes() -> None:
    assert ENCODINGS["Q4_K"].nbytes(512) == 288
    assert ENCODINGS["Q4_K"].nbytes(511) is None
    assert ENCODINGS["F4"].nbytes(3) is None
    assert ENCODINGS["F32"].nbytes(0) == 0
    assert ENCODINGS["F64"].nbytes(1 << 70) == 1 << 73


def test_scaled_formats() -> None:
    for name, dtype in CODE_DTYPE.items():
        packed, stored = ENCODINGS[name], DTYPES[dtype]
        assert stored.block_size == 1
        if PACKING[name] == "none":
            assert (packed.block_size, packed.block_bytes) == (1, stored.block_bytes)
        assert packed.bpw == {"nibble": 4, "bits6": 6}.get(PACKING[name], 8 * stored.block_bytes)
    assert CODE_DTYPE.keys() == PACKING.keys()


def test_swapped_fields_lie_in_the_block() -> None:
    for encoding in ENCODINGS.values():
        end = 0
        for offset, size, count in encoding.swap:
            assert offset >= end
            assert size in (2, 4, 8)
            end = offset + size * count
        assert end <= encoding.block_bytes


def test_named_kernels_exist() -> None:
    for encoding in ENCODINGS.values():
        if encoding.decode is not None and encoding.kind == "block":
            module, _, function = encoding.decode.partition(":")
            assert callable(getattr(importlib.import_module(f"apsi_inspect.kernels.{module}"), function))
