"""Values through `Tensor`: whole, parts, streams; compared with independent readers and with NumPy's own indexing."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import apsi_inspect as ai
from apsi_inspect.ops.read import stream

from . import handmade


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ai.ModelFile:
    (path,) = ai.samples.write(tmp_path_factory.mktemp("samples"), ["tiny-llama.gguf"])
    return ai.open(path)


def test_plain_dtypes_are_views_of_the_file(tmp_path: Path) -> None:
    arrays = {
        str(np.dtype(t)): np.arange(12).reshape(3, 4).astype(t)
        for t in ("f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8")
    }
    arrays["bfloat16"] = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16)
    arrays["float8_e4m3fn"] = np.arange(12).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    save_file(arrays, tmp_path / "m.safetensors")
    m = ai.open(tmp_path / "m.safetensors")
    for name, expected in arrays.items():
        got = np.asarray(m[name])
        assert got.dtype == expected.dtype == m[name].dtype
        assert got.tobytes() == expected.tobytes()
        assert not got.flags.writeable
        assert got.base is not None


def test_values_outlive_the_model(tmp_path: Path) -> None:
    save_file({"w": np.arange(5, dtype="f4")}, tmp_path / "m.safetensors")
    with ai.open(tmp_path / "m.safetensors") as m:
        w = np.asarray(m["w"])
    assert w.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ai.ModelFileError, match="closed"):
        m["w"].numpy()


def test_copy_and_dtype_follow_the_array_protocol(tmp_path: Path) -> None:
    save_file({"w": np.arange(4, dtype="f4")}, tmp_path / "m.safetensors")
    t = ai.open(tmp_path / "m.safetensors")["w"]
    assert np.asarray(t, dtype="f8").dtype == np.float64
    assert np.array(t, copy=True).flags.writeable
    out = np.empty(4, "f4")
    assert t.numpy(out=out) is out
    assert out.tolist() == [0, 1, 2, 3]


def test_unaligned_tensors_read_right(tmp_path: Path) -> None:
    tensors = [("a", "U8", [3], b"abc"), ("b", "F64", [2], np.array([1.5, -2.0]).tobytes())]
    (tmp_path / "m.safetensors").write_bytes(handmade.safetensors(tensors))
    assert np.asarray(ai.open(tmp_path / "m.safetensors")["b"]).tolist() == [1.5, -2.0]


def test_big_endian_gguf(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    arrays = {"f4": np.linspace(-1, 1, 64, dtype="f4").reshape(2, 32), "f2": np.arange(64, dtype="f2").reshape(2, 32)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    m = ai.open(tmp_path / "b.gguf")
    assert m.byte_order == "big"
    for name, array in arrays.items():
        assert np.array_equal(np.asarray(m[name]), array)


KEYS = st.one_of(
    st.integers(-3, 3),
    st.slices(6),
    st.tuples(st.one_of(st.integers(-6, 5), st.slices(6)), st.one_of(st.integers(-256, 255), st.slices(256))),
    st.tuples(st.just(Ellipsis), st.slices(256)),
    st.tuples(st.slices(6), st.just(Ellipsis)),
    st.just(Ellipsis),
    st.tuples(),
)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "token_embd.weight", "output.weight", "output_norm.weight"])
@settings(max_examples=60, deadline=None)
@given(key=KEYS)
def test_parts_equal_numpy(llama: ai.ModelFile, name: str, key: object) -> None:
    t = llama[name]
    whole = np.asarray(t)
    try:
        expected = whole[key]  # type: ignore[index]
    except IndexError:
        with pytest.raises(IndexError):
            t[key]
        return
    assert np.array_equal(t[key], expected)


MASK = np.arange(128) % 50 == 3


@pytest.mark.parametrize(
    "key",
    [
        [1, 3],
        [[0, 5], [7, 7]],
        np.array([0, -2]),
        MASK,
        ([3, 1], slice(40, 60)),
        ([3, 1], 7),
        ([3, 1], [5, 1]),
        (slice(None), [5, 1]),
        (slice(1, 90, 40), slice(250, 3, -9)),
        np.int64(3),
        [],
        None,
        (None, 1),
        (np.zeros((128, 256), bool)),
    ],
)
def test_other_keys_equal_numpy(llama: ai.ModelFile, key: object) -> None:
    t = llama["blk.0.attn_v.weight"]
    assert np.array_equal(t[key], np.asarray(t)[key])  # type: ignore[index]


def test_a_part_decodes_only_its_blocks(llama: ai.ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    from apsi_inspect.ops import read

    seen: list[tuple[int, ...]] = []

    def spy(encoding: object, raw: object, shape: tuple[int, ...], **more: object) -> np.ndarray:
        seen.append(shape)
        return decode(encoding, raw, shape, **more)  # type: ignore[arg-type,no-any-return]

    decode = read.decode
    monkeypatch.setattr(read, "decode", spy)
    t = llama["token_embd.weight"]  # Q8_0: blocks of 32
    assert t[7, 40:50].shape == (10,)
    assert t[::100, -1].shape == (4,)
    assert t[[5, 300]].shape == (2, 256)
    assert seen == [(32,), (4, 32), (2, 256)]


def test_parts_of_quantized_tensors(data: Path) -> None:
    m = ai.open(data / "golden" / "qtensors.apsim")
    expected = np.load(data / "golden" / "qtensors.npz")
    for name in m:
        whole = np.asarray(m[name])
        assert np.array_equal(whole, expected[name]), name
        for key in (0, -1, slice(1, 3), (slice(None, None, 2), 1), Ellipsis, (Ellipsis, slice(1, 4))):
            assert np.array_equal(m[name][key], expected[name][key]), (name, key)


def test_streams_equal_the_whole(data: Path, llama: ai.ModelFile) -> None:
    quantized = ai.open(data / "golden" / "qtensors.apsim")
    plain = ai.open(ai.samples.path("fracast.safetensors"))
    for m in (llama, quantized, plain):
        for name in m:
            pieces = list(stream(m[name], chunk=300))
            whole = np.asarray(m[name]).reshape(-1)
            assert np.array_equal(np.concatenate(pieces) if pieces else whole[:0], whole), name


def test_equal_to_safetensors_on_the_real_model() -> None:
    path = ai.samples.path("fracast.safetensors")
    m, expected = ai.open(path), load_file(path)
    assert expected.keys() == set(m)
    for name, array in expected.items():
        assert np.array_equal(np.asarray(m[name]), array)


def test_unknown_name_offers_the_nearest(llama: ai.ModelFile) -> None:
    with pytest.raises(ai.TensorNotFoundError, match=r"did you mean 'blk\.0\.attn_q\.weight'"):
        llama["blk.0.attn_q.weigth"]


def test_an_empty_tensor_of_absurd_dimensions(tmp_path: Path) -> None:
    header = '{"w":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}}'
    (tmp_path / "m.safetensors").write_bytes(handmade.from_header(header))
    t = ai.open(tmp_path / "m.safetensors")["w"]
    assert (t.numel, t.nbytes) == (0, 0)
    with pytest.raises(ai.ValueRefusedError, match="'w': NumPy has no array"):
        np.asarray(t)
