"""Conversion: every reader × writer × encoding, exact sizes, safety of what is there, memory, the cases of the bank."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import apsi_inspect as ai
from apsi_inspect import record
from apsi_inspect.cli import main
from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.scaled import PACKING
from apsi_inspect.errors import ModelFileError, ValueRefusedError, VerificationError
from apsi_inspect.formats.gguf import TYPES
from apsi_inspect.formats.safetensors import DTYPES
from apsi_inspect.ops import inputs
from apsi_inspect.ops.shared import Shared
from apsi_inspect.ops.targets import CONTAINERS, menu_of

from . import ggml_oracle, handmade
from .gguf_oracle import c_loader

RNG = np.random.default_rng(19)
SHAPE = (4, 512)
W = RNG.standard_normal(SHAPE).astype(np.float32)
CASES = Path(__file__).parent / "data" / "quant"
WRITERS = tuple(CONTAINERS.values())


def noise(encoding: str, numel: int) -> bytes:
    """Bytes of a tensor: any bits, but scales that are numbers, and small integers."""
    e = ENCODINGS[encoding]
    nbytes = e.nbytes(numel)
    assert nbytes is not None
    raw = RNG.integers(0, 256, nbytes, np.uint8)
    if e.kind == "bool":
        raw &= 1
    elif e.kind in ("int", "uint"):
        raw = RNG.integers(0, 100, numel).astype(e.dtype).view(np.uint8)
    elif e.is_block:
        blocks = raw.reshape(-1, e.block_bytes)
        for offset, size, count in e.swap if encoding not in ("IQ1_M",) else ():
            if size == 2 and offset + size * count <= e.block_bytes:
                blocks[:, offset : offset + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return raw.tobytes()


def safetensors_source(path: Path, encoding: str) -> Path:
    path = path.with_suffix(".safetensors")
    path.write_bytes(handmade.safetensors([("w.x", encoding, SHAPE, noise(encoding, 2048))], {"k": "v"}))
    return path


def gguf_source(path: Path, encoding: str) -> Path:
    path = path.with_suffix(".gguf")
    type_id = next(i for i, e in TYPES.items() if e.name == encoding)
    keys = [("general.architecture", "STRING", "llama"), ("x.y", "UINT8", 3)]
    path.write_bytes(handmade.Gguf().file(keys, [("w.x", SHAPE, type_id, noise(encoding, 2048))]))
    return path


def apsim_source(path: Path, encoding: str) -> Path:
    path = path.with_suffix(".apsim")
    x: Any = W
    if encoding in PACKING:
        x = ai.quantize(W, encoding) if encoding == "bf16" else ai.quantize(W, encoding, axis=1, block=32)
    elif ENCODINGS[encoding].block_size == 1:
        x = np.frombuffer(noise(encoding, 2048), ml_dtype(encoding)).reshape(SHAPE)
    else:
        x = W.astype(ml_dtype(encoding))
    ai.save_model(path, record(w=record(x=x)), record(k=["v", 1]))
    return path


def ml_dtype(encoding: str) -> np.dtype[Any]:
    name = ENCODINGS[encoding].dtype
    return np.dtype(getattr(ml_dtypes, name, name))


READERS: dict[str, tuple[Callable[[Path, str], Path], list[str]]] = {
    "safetensors": (safetensors_source, list(DTYPES)),
    "gguf": (gguf_source, [e.name for e in TYPES.values()]),
    "apsim": (apsim_source, [*DTYPES, *PACKING]),
}
MATRIX = [(r, e, w) for r, (_, encodings) in READERS.items() for e in encodings for w in WRITERS]


@pytest.mark.parametrize(("reader", "encoding", "writer"), MATRIX)
def test_matrix(tmp_path: Path, reader: str, encoding: str, writer: str) -> None:
    """Without a dtype nothing is lost: the values are equal, the bytes too where the target has the encoding."""
    src = READERS[reader][0](tmp_path / "src", encoding)
    dst = tmp_path / f"dst.{writer}"
    if encoding == "C64" and writer == "gguf":
        with pytest.raises(ValueRefusedError, match="C64"):
            ai.convert(src, dst)
        assert not dst.exists()
        return
    planned = ai.convert(src, dst, dry_run=True)
    assert not dst.exists()
    report = ai.convert(src, dst, durable=False)
    assert planned.size_after == report.size_after == dst.stat().st_size
    assert report.size_before == src.stat().st_size
    (change,) = report.tensors
    before, after = ai.open(src)["w.x"], ai.open(dst)["w.x"]
    assert (change.before, change.after) == (before.encoding, after.encoding)
    assert (change.nbytes_before, change.nbytes) == (before.nbytes, after.nbytes)
    a, b = before.numpy(), after.numpy()
    assert b.shape == SHAPE
    with np.errstate(invalid="ignore"):
        assert np.array_equal(a.astype(b.dtype), b, equal_nan=b.dtype.kind in "fcV")
    if change.action == "kept" and encoding != "bf16":
        assert bytes(before.raw()) == bytes(after.raw())
    else:
        assert change.action in ("exact", "expanded") or encoding == "bf16"
    if encoding in ("Q4_0", "Q8_0") and writer == "apsim":
        assert (change.action, change.after) == ("exact", {"Q4_0": "int4", "Q8_0": "int8"}[encoding])
        assert after.qparams is not None
        assert (after.qparams.axis, after.qparams.block) == (1, 32)
    if writer == "gguf" and encoding not in ("Q8_1", "Q1_0", "Q2_0", "NVFP4", "Q8_K"):
        (t,) = gguf.GGUFReader(dst).tensors
        assert t.name == "w.x"
        assert [int(n) for n in t.shape] == [512, 4]
    if writer == "safetensors" and b.dtype.isbuiltin == 1 and after.encoding != "C64":
        assert np.array_equal(load_file(dst)["w.x"], b, equal_nan=b.dtype.kind == "f")
    if writer == "apsim":
        assert ai.verify(dst).status == "intact"


@pytest.mark.parametrize(("writer", "dtype"), [(w, d) for w in WRITERS for d in menu_of(w)])
@pytest.mark.parametrize("reader", WRITERS)
def test_every_dtype_of_every_writer(tmp_path: Path, reader: str, writer: str, dtype: str) -> None:
    """From float32: ggml's blocks as its own C code, floats as ml_dtypes, .apsim as `quantize` of the whole array."""
    src, dst = tmp_path / f"src.{reader}", tmp_path / f"dst.{writer}"
    params = record(a=W, b=W[0], i=np.arange(3))
    save = {"gguf": lambda: ai.save_gguf(src, params, dtype=None), "apsim": lambda: ai.save_model(src, params),
            "safetensors": lambda: ai.save_safetensors(src, params)}[reader]  # fmt: skip
    save()
    planned = ai.convert(src, dst, dtype.lower(), dry_run=True)
    report = ai.convert(src, dst, dtype.lower(), durable=False, threads=3)
    assert planned.size_after == report.size_after == dst.stat().st_size
    model = ai.open(dst)
    t = model["a"]
    assert t.encoding == dtype
    assert np.array_equal(model["i"].numpy(), np.arange(3))
    if ENCODINGS[dtype].is_block:
        assert bytes(t.raw()) == ggml_oracle.reference(dtype, W).tobytes()
        assert model["b"].encoding == "F32"
    elif dtype in PACKING:
        q = ai.quantize(W, dtype, axis=-1)
        assert bytes(t.raw()) == q.packed.tobytes()
        assert np.array_equal(t.numpy(), np.asarray(q))
        assert model["b"].encoding == "F32"
    else:
        with np.errstate(over="ignore"):
            assert t.numpy().tobytes() == W.astype(ml_dtype(dtype)).tobytes()


# --- pieces -----------------------------------------------------------------------------------------------------------

SCALED = [
    ((6, 40), None, None), ((6, 40), 0, None), ((6, 40), 0, 4), ((6, 40), 1, None), ((6, 40), 1, 7), ((6, 41), 1, 8),
    ((3, 4, 10), 1, 3), ((3, 4, 10), 0, 2), ((2, 3, 4, 6), 1, None), ((240,), 0, 16), ((240,), 0, None),
    ((241,), None, None), ((5, 7, 3), 0, 5), ((5, 7, 3), 1, 2), ((), None, None), ((0, 4), 1, None), ((1, 300), 1, 12),
]  # fmt: skip


@pytest.mark.parametrize("piece", [1, 16, 60, 1 << 18])
@pytest.mark.parametrize(("shape", "axis", "block"), SCALED)
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp6"])
def test_pieces_of_a_quantized_tensor(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], axis: int | None, block: int | None, fmt: str, piece: int
) -> None:
    monkeypatch.setattr(inputs, "PIECE", piece)
    q = ai.quantize(RNG.standard_normal(shape).astype(np.float32), fmt, axis=axis, block=block)
    source = inputs.ScaledInput(q.tensor("w"))
    cuts = source.cuts(1)
    assert [a for a, _ in cuts] == [0, *(b for _, b in cuts)][: len(cuts)]
    got = [source.read(a, b).reshape(-1).copy() for a, b in cuts]
    expected = np.asarray(q).reshape(-1)
    assert np.array_equal(np.concatenate(got) if got else expected, expected)


@pytest.mark.parametrize("encoding", ["F16", "BF16", "F8_E4M3", "F4", "Q8_0", "Q4_K", "F64", "I16"])
def test_pieces_of_a_big_endian_gguf(tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted to little-endian, and decoded, in pieces."""
    monkeypatch.setattr(inputs, "PIECE", 256)
    if encoding not in {e.name for e in TYPES.values()}:
        src = safetensors_source(tmp_path / "src", encoding)
    else:
        type_id = next(i for i, e in TYPES.items() if e.name == encoding)
        raw = np.frombuffer(noise(encoding, 2048), np.uint8).reshape(-1, ENCODINGS[encoding].block_bytes).copy()
        for offset, size, count in ENCODINGS[encoding].swap:
            part = raw[:, offset : offset + size * count].reshape(len(raw), count, size)[:, :, ::-1]
            raw[:, offset : offset + size * count] = part.reshape(len(raw), -1)
        src = tmp_path / "src.gguf"
        src.write_bytes(handmade.Gguf(order=">").file([], [("w", SHAPE, type_id, raw.tobytes())]))
    (name,) = ai.open(src)
    expected = ai.open(src)[name].numpy()
    for writer in WRITERS:
        ai.convert(src, tmp_path / f"o.{writer}", durable=False)
        out = ai.open(tmp_path / f"o.{writer}")
        assert out.byte_order == "little"
        with np.errstate(invalid="ignore"):
            wide = [v.astype(np.float64) for v in (out[name].numpy(), expected)]
        assert np.array_equal(*wide, equal_nan=True)


def test_the_bytes_do_not_depend_on_threads_or_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = tmp_path / "s.safetensors"
    ai.save_safetensors(src, {"a": RNG.standard_normal((37, 512)).astype(np.float16), "b": W})
    found = set()
    for threads, piece in ((1, 1 << 18), (2, 512), (5, 3000)):
        monkeypatch.setattr(inputs, "PIECE", piece)
        for dst, dtype in (("o.gguf", "q5_k"), ("o.apsim", "fp4")):
            ai.convert(src, tmp_path / dst, dtype, threads=threads, force=True, durable=False)
        found.add((tmp_path / "o.gguf").read_bytes() + (tmp_path / "o.apsim").read_bytes())
    assert len(found) == 1


def test_only_lent_buffers_are_taken_back() -> None:
    shared = Shared()
    mine = np.arange(200, dtype=np.uint8)
    for piece in (mine, mine[3:90], b"bytes", memoryview(mine)):
        shared.give_back(piece)
    lent = shared.buffer(100)
    assert lent.ctypes.data % 64 == 0
    assert not np.shares_memory(lent, mine)
    shared.give_back(lent)
    shared.give_back(lent)
    again, other = shared.buffer(50), shared.buffer(50)
    assert np.shares_memory(again, lent)
    assert not np.shares_memory(again, other)


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", WRITERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_sharded_and_split(tmp_path: Path, reader: str, writer: str) -> None:
    first = tmp_path / "first.safetensors"
    ai.save_safetensors(first, [RNG.standard_normal((i + 1, 64)).astype(np.float32) for i in range(8)], {"a": "b"})
    one = ai.convert(first, tmp_path / f"one.{reader}", shard=2000)
    assert len(one.files) > 2
    planned = ai.convert(one.path, tmp_path / f"two.{writer}", shard=3000, dry_run=True)
    two = ai.convert(one.path, tmp_path / f"two.{writer}", shard=3000)
    assert planned.size_after == two.size_after == sum(os.path.getsize(f) for f in two.files)
    assert planned.files == two.files
    three = ai.convert(two.path, tmp_path / "three.safetensors")
    a, b = ai.open(first), ai.open(three.path)
    assert set(a) == set(b)
    assert all(np.array_equal(a[n].numpy(), b[n].numpy()) for n in a)
    assert b.metadata["a"] == "b"
    if writer == "gguf":
        assert None not in c_loader(*two.files)
    if writer == "apsim":
        assert ai.verify(two.path).status == "intact"


def test_an_incomplete_split_is_not_converted(tmp_path: Path) -> None:
    report = ai.save_gguf(tmp_path / "m.gguf", {f"t{i}": W for i in range(3)}, shard=5000, dtype=None)
    report = ai.save_gguf(tmp_path / "m.gguf", {f"t{i}": W + i for i in range(3)}, shard=9000, dtype=None)
    os.unlink(report.files[1])
    with pytest.raises(ModelFileError, match="missing"):
        ai.convert(report.files[0], tmp_path / "o.safetensors")


# --- what is there ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    ai.save_safetensors(path, {"w": W, "n": W[0]}, {"name": "x"})
    return path


def test_nothing_is_overwritten_unasked(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_bytes(b"mine")
    for dry_run in (True, False):
        with pytest.raises(FileExistsError, match="force"):
            ai.convert(source, target, dry_run=dry_run)
    assert target.read_bytes() == b"mine"
    target.chmod(0o640)
    ai.convert(source, target, force=True)
    assert target.stat().st_mode & 0o777 == 0o640
    assert "w" in ai.open(target)


def test_the_other_form_of_the_target_counts_as_there(tmp_path: Path, source: Path) -> None:
    split = ai.convert(source, tmp_path / "out.gguf", shard=3000)
    assert len(split.files) == 2
    with pytest.raises(FileExistsError):
        ai.convert(source, tmp_path / "out.gguf")
    ai.convert(source, tmp_path / "out.gguf", force=True)
    assert not any(os.path.exists(f) for f in split.files)
    again = ai.convert(source, tmp_path / "out.gguf", shard=3000, force=True)
    assert sorted(p.name for p in tmp_path.glob("out*")) == sorted(os.path.basename(f) for f in again.files)


def test_a_shard_of_the_source_is_no_target(tmp_path: Path, source: Path) -> None:
    sharded = ai.convert(source, tmp_path / "s.safetensors", shard=3000)
    before = {f: Path(f).read_bytes() for f in sharded.files}
    for target in sharded.files:
        if target.endswith(".safetensors"):
            with pytest.raises(ValueRefusedError, match="part of the source"):
                ai.convert(sharded.path, target, force=True)
    with pytest.raises(ValueRefusedError, match="part of the source"):
        ai.convert(sharded.path, tmp_path / "s.safetensors", force=True)  # its shards would be taken for stale ones
    os.symlink(sharded.files[0], tmp_path / "link.safetensors")
    with pytest.raises(ValueRefusedError, match="part of the source"):
        ai.convert(sharded.path, tmp_path / "link.safetensors", force=True)
    assert {f: Path(f).read_bytes() for f in sharded.files} == before


def test_in_place_over_a_mapped_file(source: Path) -> None:
    model = ai.open(source)
    view = model["w"].numpy()
    assert not view.flags.owndata
    ai.convert(source, source, "f16", force=True)
    assert np.array_equal(view, W)  # the old mapping keeps the old bytes
    assert np.array_equal(model["n"].numpy(), W[0])
    assert np.array_equal(ai.open(source)["w"].numpy(), W.astype(np.float16))
    with ai.open(source) as opened:
        ai.convert(opened, source, "f32", force=True)
    assert ai.open(source)["w"].encoding == "F32"


def test_paths_that_cannot_be_written(tmp_path: Path, source: Path) -> None:
    with pytest.raises(OSError, match="no such folder"):
        ai.convert(source, tmp_path / "missing" / "dir" / "o.gguf")
    (tmp_path / "o.gguf").symlink_to("/nowhere/at/all")
    with pytest.raises(FileExistsError):
        ai.convert(source, tmp_path / "o.gguf")
    with pytest.raises(FileNotFoundError):
        ai.convert(source, tmp_path / "o.gguf", force=True)
    for name in ("o.bin", "o", "o.onnx"):
        with pytest.raises(ValueRefusedError, match="ending"):
            ai.convert(source, tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "o.gguf"]


def test_odd_paths(tmp_path: Path, source: Path) -> None:
    for name in ("a b #1 100%", "modèle 🦙", "-rf", "n" * 230):
        path = tmp_path / f"{name}.safetensors"
        os.rename(source, path)
        for ending in CONTAINERS:
            ai.convert(path, tmp_path / f"{name}-out{ending}")
            assert np.array_equal(ai.open(tmp_path / f"{name}-out{ending}")["w"].numpy(), W)
        os.rename(path, source)


_SLOW = """
import sys, time
from apsi_inspect.ops import recode
from apsi_inspect.cli import main
was = recode._floats
def slow(*args):
    time.sleep(0.05)
    return was(*args)
recode._floats = slow
print("ready", flush=True)
sys.exit(main(["model", "convert", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("ending", CONTAINERS)
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_interrupted_and_killed(tmp_path: Path, ending: str, sign: signal.Signals, code: int) -> None:
    src, dst = tmp_path / "s.safetensors", tmp_path / f"d{ending}"
    ai.save_safetensors(src, {f"t{i}": W + i for i in range(200)})
    dst.write_bytes(b"old")
    argv = [sys.executable, "-c", _SLOW, str(src), str(dst), "--dtype", "f16", "--force"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".apsi-*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    child.send_signal(sign)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert dst.read_bytes() == b"old"
    left = [p.name for p in tmp_path.glob(".apsi-*")]
    if sign == signal.SIGINT:
        assert not left
    else:  # what a killed process left looks like no model, and goes with the next write
        assert all(not n.endswith(tuple(CONTAINERS)) for n in left)
        ai.convert(src, dst, force=True)
        assert not list(tmp_path.glob(".apsi-*"))


def test_a_refused_value_leaves_what_was_there(tmp_path: Path) -> None:
    src, dst = tmp_path / "s.safetensors", tmp_path / "d.gguf"
    bad = W.copy()
    bad[3, 7] = np.nan
    ai.save_safetensors(src, {"good": W, "bad.w": bad})
    dst.write_bytes(b"old")
    with pytest.raises(ValueRefusedError, match=r"bad\.w"):
        ai.convert(src, dst, "q8_0", force=True)
    assert dst.read_bytes() == b"old"
    assert main(["model", "convert", str(src), str(dst), "--dtype", "q8_0", "--force"]) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.gguf", "s.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize(("dst", "dtype"), [("o.gguf", "q8_0"), ("o.apsim", "int4"), ("o.safetensors", None)])
def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, measured: Callable[..., tuple[str, float]], dst: str, dtype: str | None
) -> None:
    """A warm process, then 512 MiB: at most 64 MiB more (goal 19 of docs/performance.md)."""
    src = tmp_path / "s.safetensors"
    x = RNG.standard_normal((4096, 4096)).astype(np.float16)
    data = b"".join(np.roll(x, i).tobytes() for i in range(16))
    shape = [4096, 4096]
    table = {f"t{i}": {"dtype": "F16", "shape": shape, "data_offsets": [i << 25, (i + 1) << 25]} for i in range(16)}
    src.write_bytes(handmade.from_header(json.dumps(table), data, align=8))
    small = tmp_path / "small.safetensors"
    ai.save_safetensors(small, {"t": x[:64]})
    code = (
        "small, src, dst, dtype = sys.argv[1:]\ndtype = None if dtype == 'None' else dtype\n"
        "apsi_inspect.convert(small, dst, dtype, force=True)\nstart = peak()\n"
        "apsi_inspect.convert(src, dst, dtype, force=True, durable=False)"
    )
    _, grew = measured(code, small, src, tmp_path / dst, dtype)
    assert grew < 64


# --- rules, keys, command ---------------------------------------------------------------------------------------------


def test_rules(tmp_path: Path) -> None:
    src = tmp_path / "s.safetensors"
    ai.save_safetensors(src, {"blk": [{"v": W, "k": W + 1, "n": W[0]}, {"v": W + 2, "k": W + 3, "n": W[1]}]})
    rules = ["blk.*.v=q6_k", "blk.1.[kv]=q5_0", "blk.1.n=f16"]
    report = ai.convert(src, tmp_path / "o.gguf", "q4_0", tensor_types=rules)
    found = {t.name: t.after for t in report.tensors}
    assert found == {
        "blk.0.k": "Q4_0", "blk.0.v": "Q6_K", "blk.0.n": "F32", "blk.1.k": "Q5_0", "blk.1.v": "Q5_0", "blk.1.n": "F16",
    }  # fmt: skip
    for rules, word in (
        (["nothing.*=q8_0"], "nothing"),
        (["blk.0.v"], "PATTERN=TYPE"),
        (["*=q9"], "q9"),
        (["*.n=q8_0"], "1-D"),
    ):
        with pytest.raises(ValueRefusedError, match=word.replace("*", r"\*")):
            ai.convert(src, tmp_path / "p.gguf", tensor_types=rules)
    assert not (tmp_path / "p.gguf").exists()


def test_keys_sign_and_verify(tmp_path: Path, source: Path) -> None:
    signed, again, other = tmp_path / "a.apsim", tmp_path / "b.apsim", tmp_path / "c.apsim"
    ai.convert(source, signed, key="one secret")
    assert ai.verify(signed, "one secret").status == "authentic"
    with pytest.raises(VerificationError):
        ai.convert(signed, again, key="another secret")
    assert not again.exists()
    ai.convert(signed, again, key="another secret", source_key="one secret")
    assert ai.verify(again, "another secret").status == "authentic"
    ai.convert(again, other, sign="third secret", key="another secret")
    assert ai.verify(other, "third secret").status == "authentic"
    ai.convert(signed, tmp_path / "d.gguf", key="one secret")
    with pytest.raises(ValueRefusedError, match="key"):
        ai.convert(source, tmp_path / "e.gguf", key="one secret")
    unsigned = tmp_path / "f.apsim"
    ai.convert(source, unsigned)
    with pytest.raises(VerificationError):
        ai.convert(unsigned, tmp_path / "g.gguf", source_key="one secret")
    raw = bytearray(unsigned.read_bytes())
    raw[-1] ^= 1
    unsigned.write_bytes(raw)
    with pytest.raises(VerificationError):
        ai.convert(unsigned, tmp_path / "g.gguf")
    assert main(["model", "convert", str(unsigned), str(tmp_path / "g.gguf")]) == 1
    assert not (tmp_path / "g.gguf").exists()


def test_the_command(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dst = tmp_path / "o.gguf"
    argv = ["model", "convert", str(source), str(dst), "--dtype", "q8_0", "--tensor-type", "n=f32"]
    assert main([*argv, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["dry_run"] is True
    assert not dst.exists()
    assert main([*argv, "--architecture", "llama", "--alignment", "64"]) == 0
    assert "Q8_0" in capsys.readouterr().out
    assert main(argv) == 3
    assert "--force" in capsys.readouterr().err
    assert main([*argv, "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["size_after"] == planned["size_after"] == dst.stat().st_size
    assert {t["name"]: t["after"] for t in document["tensors"]} == {"w": "Q8_0", "n": "F32"}
    for bad, code in (
        (["--dtype", "q4_k_m"], 2), (["--tensor-type", "zzz=f16"], 2), (["--shard", "big"], 2),
        (["--alignment", "3"], 2),
    ):  # fmt: skip
        assert main(["model", "convert", str(source), str(tmp_path / "x.gguf"), *bad]) == code
    assert main(["model", "convert", str(tmp_path / "nothing"), str(tmp_path / "x.gguf")]) == 3
    assert not (tmp_path / "x.gguf").exists()


# --- the bank of cases ------------------------------------------------------------------------------------------------

EXPECTED: dict[str, Any] = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))
TARGETS = [("gguf", d) for d in ("q8_0", "q4_0", "mxfp4", "q5_0")]
TARGETS += [("apsim", d) for d in ("int8", "int4", "fp8")]


@pytest.mark.parametrize("case", [c for c in EXPECTED if c.startswith("qz-enc")])
@pytest.mark.parametrize(("writer", "dtype"), TARGETS)
def test_quantizing_the_cases(tmp_path: Path, case: str, writer: str, dtype: str) -> None:
    src, dst = CASES / f"{case}.safetensors", tmp_path / f"o.{writer}"
    source = ai.open(src)
    if case == "qz-enc-inf" or (case == "qz-enc-f16-scale" and dtype == "q4_0"):
        word = "not finite" if case == "qz-enc-inf" else "float16 scale"
        with pytest.raises(ValueRefusedError, match=rf"'ffn\.weight'.*{word}"):
            ai.convert(src, dst, dtype)
        assert list(tmp_path.iterdir()) == []
        return
    report = ai.convert(src, dst, dtype)
    model = ai.open(dst)
    values = model["ffn.weight"].numpy()
    assert values.shape == source["ffn.weight"].shape
    assert np.isfinite(values.astype(np.float64)).all()
    reference = EXPECTED[case].get("if_target_is_gguf", {}).get("sha256_of_quantised_bytes", {})
    if writer == "gguf" and dtype.upper() in reference:
        assert hashlib.sha256(model["ffn.weight"].raw()).hexdigest() == reference[dtype.upper()]
    if case == "qz-enc-zero-block":
        assert not values[1].any()
    if case == "qz-enc-subnormal" and (writer == "apsim" or dtype == "q8_0"):
        assert np.abs(values[2] - source["ffn.weight"].numpy()[2]).max() < 1e-37
    if case == "qz-enc-row-33" and writer == "gguf":
        assert any("33" in t.reason for t in report.tensors)
    for name in source:
        if source[name].info.encoding.kind in ("int", "uint", "bool"):
            assert np.array_equal(model[name].numpy(), source[name].numpy())
            if writer == "apsim":
                assert model[name].encoding == source[name].encoding


def test_casting_to_bfloat16(tmp_path: Path) -> None:
    ai.convert(CASES / "qz-cast-bf16.safetensors", tmp_path / "o.safetensors", "bf16")
    bits = np.frombuffer(ai.open(tmp_path / "o.safetensors")["x"].raw(), np.uint16)
    expected = EXPECTED["qz-cast-bf16"]["bf16_bits"]
    for i, text in expected["non_nan_index_to_bits"].items():
        assert f"{bits[int(i)]:04x}" == text
    assert np.isnan(bits.view(ml_dtypes.bfloat16)[expected["nan_stays_nan"]].astype(np.float32)).all()


def test_casting_to_a_float_without_infinity_and_integers(tmp_path: Path) -> None:
    with pytest.raises(ValueRefusedError, match=r"'x'.*too large"):
        ai.convert(CASES / "qz-cast-e4m3.safetensors", tmp_path / "o.safetensors", "f8_e4m3")
    for writer in WRITERS:
        ai.convert(CASES / "qz-cast-int.safetensors", tmp_path / f"o.{writer}", "f16")
        t = ai.open(tmp_path / f"o.{writer}")["position_ids"]
        assert t.encoding == "I64"
        assert hashlib.sha256(t.raw()).hexdigest() == EXPECTED["qz-cast-int"]["tensors"]["position_ids"]["sha256_raw"]


def test_long_names_are_kept_whole_and_said(tmp_path: Path) -> None:
    names = ["a" * 70 + "b" * 10, "a" * 70 + "c" * 10]
    ai.save_safetensors(tmp_path / "s.safetensors", {n: W + i for i, n in enumerate(names)})
    report = ai.convert(tmp_path / "s.safetensors", tmp_path / "o.gguf")
    (finding,) = [f for f in report.findings if f.code == "long-name"]
    assert "name" in finding.message
    assert "63" in finding.message
    assert sorted(ai.open(tmp_path / "o.gguf")) == names
