"""Importance matrices: files as llama-imatrix writes them, made with the gguf package (or by hand: the older kind)."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from apsi_inspect import samples
from apsi_inspect.errors import ModelFileError, ValueRefusedError
from apsi_inspect.ops.imatrix import Imatrix, read_imatrix, weights_of


def write(
    path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]], extra: dict[str, np.ndarray] | None = None
) -> Path:
    """The GGUF of `IMatrixCollector::save_imatrix`: sums (matrices, row) and counts (matrices, 1)."""
    w = gguf.GGUFWriter(path, "none")
    w.kv_data[0].pop("general.architecture")
    w.add_type("imatrix")
    w.add_array("imatrix.datasets", ["calibration.txt", "more.txt"])
    w.add_uint32("imatrix.chunk_count", 12)
    w.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        w.add_tensor(f"{name}.in_sum2", np.asarray(sums))
        w.add_tensor(f"{name}.counts", np.asarray(counts, np.float32).reshape(-1, 1))
    for name, array in (extra or {}).items():
        w.add_tensor(name, array)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def legacy(entries: list[tuple[bytes, int, list[float]]], tail: bytes = b"") -> bytes:
    out = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        out += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
        out += np.array(values, "<f4").tobytes()
    return out + tail


def test_weights_are_the_mean_squares(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sums = rng.random((1, 8)).astype(np.float32)
    experts = rng.random((3, 4)).astype(np.float32)
    path = write(
        tmp_path / "m.gguf", {"blk.0.attn_q.weight": (sums, np.array([6])), "exps": (experts, np.array([2, 0, 5]))}
    )
    found = read_imatrix(path)
    assert set(found.weights) == {"blk.0.attn_q.weight", "exps"}
    assert (found.datasets, found.chunks, found.chunk_size) == (("calibration.txt", "more.txt"), 12, 512)
    np.testing.assert_array_equal(found.columns("blk.0.attn_q.weight", (5, 8)), sums / np.float32(6))
    columns = found.columns("exps", (3, 7, 4))
    assert columns is not None
    np.testing.assert_array_equal(columns[0], experts[0] / np.float32(2))
    np.testing.assert_array_equal(columns[1], np.ones(4))  # never used
    np.testing.assert_array_equal(columns[2], experts[2] / np.float32(5))
    assert found.columns("other", (5, 8)) is None
    with pytest.raises(ValueError, match="read-only"):
        found.weights["exps"][0] = 1


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    found = read_imatrix(write(tmp_path / "m.gguf", {"a": (np.ones((1, 8), np.float32), np.array([1]))}))
    with pytest.raises(ModelFileError, match=r"'a': has 8 weights, the model's tensor needs 16 \(of another model\?\)"):
        found.columns("a", (4, 16))


def test_the_older_file(tmp_path: Path) -> None:
    tail = struct.pack("<ii", 7, 8) + b"wiki.txt"
    path = tmp_path / "imatrix.dat"
    path.write_bytes(legacy([(b"a.weight", 4, [4, 8, 0]), (b"b", 0, [1.5])], tail))
    found = read_imatrix(path)
    assert found.weights["a.weight"].tolist() == [1, 2, 0]
    assert found.weights["b"].tolist() == [1.5]
    assert (found.chunks, found.datasets) == (7, ("wiki.txt",))
    path.write_bytes(legacy([(b"a.weight", 4, [4, 8, 0])]))
    assert read_imatrix(path).datasets == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "takes 4 bytes, 0 are left"),
        (b"\x00\x00\x00\x00", "the number of entries is 0"),
        (b"abcdefgh", "the number of entries is 1684234849"),
        (legacy([(b"a", 1, [1.0])])[:-1], "entry 1 of 1: is no importance matrix or cut off: 1 values takes 4 bytes"),
        (legacy([(b"\xff", 1, [1.0])]), "a name is not UTF-8"),
        (legacy([(b"a", 1, [float("nan")])]), "'a': has values that are negative or not finite"),
        (legacy([(b"a", 1, [-1.0])]), "'a': has values that are negative or not finite"),
        (legacy([(b"a", 1, [])]), "its number of values is 0"),
        (legacy([(b"a", 1, [1.0]), (b"a", 1, [1.0])]), "entry 2 of 2: has 'a' twice"),
        (legacy([(b"a", 1, [1.0])], struct.pack("<ii", 1, 1) + b"xyz"), "has 2 bytes after its end"),
    ],
)
def test_a_bad_older_file_is_one_error(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        read_imatrix(path)


def test_a_cut_off_older_file_is_one_error(tmp_path: Path) -> None:
    whole = legacy([(b"a.weight", 4, [4, 8, 0])], struct.pack("<ii", 1, 1) + b"x")
    path = tmp_path / "imatrix.dat"
    for n in range(len(whole)):
        if n not in (len(whole) - 9, len(whole) - 5):  # where what comes after is left out
            path.write_bytes(whole[:n])
            with pytest.raises(ModelFileError):
                read_imatrix(path)


def test_a_bad_gguf_is_one_error(tmp_path: Path) -> None:
    ones = np.ones((1, 8), np.float32)
    path = tmp_path / "m.gguf"
    cases: list[tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, np.ndarray], str]] = [
        ({}, {"x": ones}, r"is no importance matrix \(its type is 'imatrix'\): no tensor ends in .in_sum2"),
        ({}, {"a.in_sum2": ones}, "'a': has no 'a.counts' beside its counterpart"),
        ({}, {"a.counts": ones}, "'a': has no 'a.in_sum2' beside its counterpart"),
        ({"a": (ones, np.ones(3))}, {}, "'a': has 8 sums for 3 counts"),
        ({"a": (ones * np.float32("inf"), np.ones(1))}, {}, "'a.in_sum2': has values that are negative or not finite"),
        ({"a": (-ones, np.ones(1))}, {}, "'a.in_sum2': has values that are negative or not finite"),
        ({"a": (ones.astype(np.float16), np.ones(1))}, {}, "'a.in_sum2': is F16, F32 was expected"),
    ]
    for entries, extra, message in cases:
        write(path, entries, extra)
        with pytest.raises(ModelFileError, match=message):
            read_imatrix(path)
    (model,) = samples.write(tmp_path, ["tiny-llama.gguf"])
    with pytest.raises(ModelFileError, match="is no importance matrix"):
        read_imatrix(model)


def test_given_as_a_path_or_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"a": (np.ones((1, 8), np.float32), np.array([1]))})
    found = weights_of(path)
    assert isinstance(found, Imatrix)
    assert weights_of(found) is found
    assert repr(found) == "<Imatrix of 1 tensor, 12 chunks>"
    with pytest.raises(ValueRefusedError, match="weights are list"):
        weights_of([1.0])  # type: ignore[arg-type]
