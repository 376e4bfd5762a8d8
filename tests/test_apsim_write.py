"""Writing .apsim: the files of an independent implementation again, byte for byte; layout, digests, shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import apsi_inspect as ai
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.formats.apsim_write import split
from apsi_inspect.integrity.signing import Key, signer
from apsi_inspect.ops import save

from . import apsim_oracle

SALT = bytes(range(16))
SINGLE = [
    "degenerate", "dtypes", "list_root_tied", "names", "no_tensors", "qtensors", "tree", "tree_from_names", "units",
    "signed_secret", "signed_bytes",
]  # fmt: skip


def user_metadata(path: Path) -> Any:
    raw = path.read_bytes()
    meta = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    return None if "metadata" not in meta else ai.open(path).metadata


def signer_of(name: str) -> Any:
    if name == "signed_bytes":
        return signer(Key(bytes(range(32))))
    return signer(Key("team secret"), SALT) if name in ("signed_secret", "sharded") else None


def write_again(params: Any, golden: Path, target: Path, shard: int | None = None) -> str:
    by = signer_of("sharded" if shard else golden.stem)
    metadata = ai.open(golden).metadata if shard else user_metadata(golden)
    return save._save(str(target), params, metadata, by, shard, True, None, "apsim_ref/1")


@pytest.mark.parametrize("name", SINGLE)
def test_golden_from_an_opened_file(name: str, data: Path, tmp_path: Path) -> None:
    golden = data / "golden" / f"{name}.apsim"
    with ai.open(golden) as m:
        write_again(m, golden, tmp_path / "x.apsim")
    assert (tmp_path / "x.apsim").read_bytes() == golden.read_bytes()


@pytest.mark.parametrize("name", [n for n in SINGLE if n != "units"])
def test_golden_from_loaded_arrays(name: str, data: Path, tmp_path: Path) -> None:
    golden = data / "golden" / f"{name}.apsim"
    write_again(ai.load_model(golden), golden, tmp_path / "x.apsim")
    assert (tmp_path / "x.apsim").read_bytes() == golden.read_bytes()


def test_golden_units_from_quantities(data: Path, tmp_path: Path) -> None:
    """All symbols are rebuilt; the one tensor that the golden file leaves without a symbol gains its own."""
    golden = data / "golden" / "units.apsim"
    write_again(ai.load_model(golden), golden, tmp_path / "x.apsim")
    _, meta, values = apsim_oracle.check(tmp_path / "x.apsim")
    _, expected, expected_values = apsim_oracle.check(golden)
    assert meta["units"] == expected["units"]
    symbols = json.loads(meta["unit_symbols"])
    assert symbols.pop("noise") == "kg*m**2/A/s**2.5"
    assert symbols == json.loads(expected["unit_symbols"])
    assert values == expected_values


@pytest.mark.parametrize("limit", [64, 87])
def test_golden_shards(limit: int, data: Path, tmp_path: Path) -> None:
    folder = data / "golden" / "sharded"
    with ai.open(folder / "model.apsim.index.json") as m:
        assert write_again(m, folder / "model.apsim.index.json", tmp_path / "model.apsim", limit).endswith(
            ".index.json"
        )
    written = sorted(p.name for p in tmp_path.iterdir())
    assert written == sorted(p.name for p in folder.iterdir())
    for name in written:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    apsim_oracle.check_sharded(tmp_path / "model.apsim.index.json", "team secret")


def big(n: int = 3, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"w{i}": rng.integers(0, 255, (1024 + i, 4096), np.uint8).view(np.float32) for i in range(n)}


def test_chunks_and_signature(tmp_path: Path) -> None:
    path = tmp_path / "m.apsim"
    ai.save_model(path, big(), {"step": 1}, sign="correct horse")
    apsim_oracle.check_signed(path, "correct horse")
    ai.save_model(path, big(), sign=bytes(range(40)))
    apsim_oracle.check_signed(path, bytes(range(40)))


@pytest.mark.parametrize("size", [0, 1, 8_388_607, 8_388_608, 8_388_609, 2 * 8_388_608, 2 * 8_388_608 + 1])
def test_chunk_borders(size: int, tmp_path: Path) -> None:
    path = tmp_path / "m.apsim"
    ai.save_model(path, {"x": np.arange(size, dtype=np.uint64).astype(np.uint8)})
    apsim_oracle.check(path)
    assert ai.verify(path).status == "intact"


def test_same_input_same_bytes(tmp_path: Path) -> None:
    tree = {"b": big(2), "a": [np.float16([1, 2]), (np.int8(3), None)]}
    for name in "xy":
        ai.save_model(tmp_path / name, tree, {"z": 1, "a": [1.0, -0.0]}, sign=b"k" * 16)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    reordered = {"a": tree["a"], "b": tree["b"]}
    ai.save_model(tmp_path / "z", reordered, {"z": 1, "a": [1.0, -0.0]}, sign=b"k" * 16)
    assert apsim_oracle.split(tmp_path / "z")[2] == apsim_oracle.split(tmp_path / "x")[2]


def test_metadata_text(tmp_path: Path) -> None:
    given = {
        "b": 1,
        "a": [1.0, -0.0, 1e-5, 1e22, True, None, "é\u2028"],
        "$x": {"$$y": 2**53},
        "n": float("nan"),
        "i": -(2**60),
    }
    path = tmp_path / "m.apsim"
    ai.save_model(path, {"w": np.zeros(1)}, given)
    text = apsim_oracle.check(path)[1]["metadata"]
    assert text == (
        '{"b":1,"a":[1.0,-0.0,1e-05,1e+22,true,null,"é\u2028"],"$$x":{"$$$y":{"$int":"9007199254740992"}},'
        '"n":{"$float":"nan"},"i":{"$int":"-1152921504606846976"}}'
    )
    back = dict(ai.open(path).metadata)
    assert back.pop("n") != given.pop("n")
    assert back == given
    assert list(back) == list(given)
    assert safetensors.safe_open(path, "np").metadata()["format"] == "apsi-model"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"b": b"x"}, "b"),
        ({"a": [1, {"d": object()}]}, "a[1].d"),
        ({1: 2}, "1"),
        ({"s": "\ud800"}, "s"),
        ({"\udc00": 1}, ""),
    ],
)
def test_metadata_refused(given: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueRefusedError, match="metadata") as caught:
        ai.save_model(tmp_path / "m.apsim", {"w": np.zeros(1)}, given)
    assert place in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_numpy_numbers_in_metadata(tmp_path: Path) -> None:
    ai.save_model(tmp_path / "m", {}, {"i": np.int64(3), "f": np.float32(0.5), "t": (1, 2), "b": np.bool_(True)})
    assert ai.open(tmp_path / "m").metadata == {"i": 3, "f": 0.5, "t": [1, 2], "b": True}


def test_other_readers(tmp_path: Path) -> None:
    """The Rust library opens what we write, quantized tensors and shards included."""
    rng = np.random.default_rng(1)
    tree = {
        "W": rng.normal(size=(8, 66)),
        "q": ai.quantize(rng.normal(size=(4, 66)), "int4"),
        "b": [np.float32(1), None],
    }
    ai.save_model(tmp_path / "m.apsim", tree, {"a": 1}, sign=b"k" * 16)
    with safetensors.safe_open(tmp_path / "m.apsim", "np") as f:
        assert sorted(f.keys()) == ["W", "b.0", "q", "q__qscale"]
        np.testing.assert_array_equal(f.get_tensor("W"), tree["W"])
        np.testing.assert_array_equal(f.get_tensor("q"), tree["q"].packed)


class TestShards:
    def test_filled_in_order(self) -> None:
        from apsi_inspect.ops.leaves import to_item

        sizes = {"a": 30, "b": 30, "c": 50, "d": 200, "e": 10, "f": 0}
        items = [to_item(n, np.zeros(s, np.uint8), n) for n, s in sizes.items()]
        assert [[i.name for i in g] for g in split(items, 100)] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
        assert [[i.name for i in g] for g in split(items, 110)] == [["a", "b", "c"], ["d"], ["e", "f"]]
        assert split(items, 10**9) == [sorted(items, key=lambda i: i.name)]

    def test_codes_and_scales_stay_together(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tree = {f"l{i}": {"q": ai.quantize(rng.normal(size=(8, 64)), "int8"), "b": np.zeros(8)} for i in range(4)}
        index = ai.save_model(tmp_path / "m.apsim", tree, {"n": 1}, sign="s", shard=700)
        document = apsim_oracle.check_sharded(Path(index), "s")
        for name, file in document["weight_map"].items():
            assert document["weight_map"][name.removesuffix("__qscale")] == file
        assert ai.verify(index, "s").status == "authentic"

    def test_tree_and_order_over_shards(self, tmp_path: Path) -> None:
        tree = {"z": np.zeros(100, np.uint8), "a": {"y": np.zeros(10), "x": (np.zeros(3, "f4"), None)}, "e": []}
        index = ai.save_model(tmp_path / "m.apsim", tree, shard=90)
        loaded = ai.load_model(index)
        assert list(loaded) == ["z", "a", "e"]
        assert list(loaded.a) == ["y", "x"]
        assert loaded.a.x[1] is None

    def test_one_shard_is_a_file(self, tmp_path: Path) -> None:
        assert ai.save_model(tmp_path / "m.apsim", {"w": np.zeros(100)}, shard=10) == str(tmp_path / "m.apsim")

    @pytest.mark.parametrize("bad", ["", "0", "GB", "4XB", "-1GB", 0, -5, True, 1.5])
    def test_bad_sizes(self, bad: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueRefusedError):
            ai.save_model(tmp_path / "m", {}, shard=bad)

    def test_sizes(self) -> None:
        sizes = {"4GB": 4 * 10**9, "4GiB": 4 * 2**30, "1.5 MB": 1_500_000, "512": 512, "10kb": 10_000, None: None, 7: 7}
        assert {s: save.parse_size(s) for s in sizes} == sizes


class TestOtherFormGoes:
    """After a save there is one form of a checkpoint, so that no stale copy can load."""

    tree: ClassVar = {"a": np.zeros(100), "b": np.ones(100), "c": np.full(100, 2.0)}

    def names(self, folder: Path) -> list[str]:
        return sorted(p.name for p in folder.iterdir())

    def test_all_ways(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        (tmp_path / "m-00001-of-00009.safetensors").write_bytes(b"another's")
        (tmp_path / "mm-00001-of-00009.apsim").write_bytes(b"another's")
        others = self.names(tmp_path)
        ai.save_model(path, self.tree, shard=800)
        three = [f"m-0000{i}-of-00003.apsim" for i in (1, 2, 3)]
        assert self.names(tmp_path) == sorted([*three, "m.apsim.index.json", *others])
        assert ai.load_model(path).b[0] == 1
        ai.save_model(path, self.tree, shard=1600)
        two = [f"m-0000{i}-of-00002.apsim" for i in (1, 2)]
        assert self.names(tmp_path) == sorted([*two, "m.apsim.index.json", *others])
        ai.save_model(path, self.tree)
        assert self.names(tmp_path) == sorted(["m.apsim", *others])
        ai.save_model(path, self.tree, shard=800)
        assert self.names(tmp_path) == sorted([*three, "m.apsim.index.json", *others])

    def test_links(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        target = tmp_path / "real" / "blob"
        ai.save_model(target, self.tree)
        link = tmp_path / "m.apsim"
        link.symlink_to("real/blob")
        ai.save_model(link, {"a": np.ones(1)})
        assert link.is_symlink()
        assert ai.load_model(target).a[0] == 1
        assert self.names(tmp_path / "real") == ["blob"]


def test_what_the_reader_refuses_is_not_written(tmp_path: Path) -> None:
    deep: Any = np.zeros(1)
    for _ in range(200):
        deep = (deep,)
    with pytest.raises(ValueRefusedError, match="nested"):
        ai.save_model(tmp_path / "m", {"a": deep})
    assert list(tmp_path.iterdir()) == []


def test_copy_of_a_model_stays_one(data: Path, tmp_path: Path) -> None:
    """Saving an opened model and a copied folder agree."""
    shutil.copytree(data / "golden" / "sharded", tmp_path / "s")
    with ai.open(tmp_path / "s") as m:
        ai.save_model(tmp_path / "one.apsim", m, dict(m.metadata), shard=None)
    one = ai.load_model(tmp_path / "one.apsim")
    many = ai.load_model(tmp_path / "s")
    assert list(one.layers[0]) == list(many.layers[0])
    np.testing.assert_array_equal(np.asarray(one.layers[2].W), np.asarray(many.layers[2].W))
