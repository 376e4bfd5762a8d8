"""Digests: canonical JSON, every byte of a file flipped, every truncation, chunks and where the damage is."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, TruncatedFileError, VerificationError
from apsi_inspect.integrity.digests import CHUNK, Hashing, jcs, root_of
from apsi_inspect.integrity.signing import Key, signer

from . import apsim_oracle

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
json_values = st.recursive(
    st.one_of(
        texts,
        st.integers(-(2**53) + 1, 2**53 - 1),
        st.booleans(),
        st.none(),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(texts, v, max_size=4)),
    max_leaves=8,
)


class TestJcs:
    @given(json_values)
    def test_as_the_package(self, value: Any) -> None:
        assert jcs(value) == rfc8785.dumps(value)

    @given(st.dictionaries(texts, st.dictionaries(texts, st.one_of(texts, st.lists(st.integers(0, 9), max_size=3)))))
    def test_as_the_oracle(self, value: Any) -> None:
        assert jcs(value) == apsim_oracle.jcs(value)

    def test_order_is_that_of_utf16(self) -> None:
        assert jcs({"\ufb33": 1, "\U0001f600": 2}) == '{"\U0001f600":2,"\ufb33":1}'.encode()

    def test_too_big(self) -> None:
        with pytest.raises(ValueError, match=r"integer|9007199254740992|bounds|safe"):
            jcs({"a": 2**53})

    def test_too_deep(self) -> None:
        value: Any = 1
        for _ in range(300):
            value = [value]
        with pytest.raises(ValueError, match="deeper"):
            jcs(value)


@pytest.mark.parametrize(
    "cuts", [[], [CHUNK], [CHUNK - 1], [CHUNK, 5], [CHUNK, CHUNK], [CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, 1]]
)
def test_hashing(cuts: list[int]) -> None:
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 256, n, np.uint8).tobytes() for n in cuts]
    with Hashing(b"table", sum(cuts)) as h:
        for p in pieces:
            h.feed([memoryview(p)[:3], memoryview(p)[3:]])
        found = h.finish()
    assert found.sha256 == hashlib.sha256(b"table" + b"".join(pieces)).hexdigest()
    if sum(cuts) > CHUNK:
        assert found.chunks == [hashlib.sha256(p).digest() for p in pieces]
        assert found.root == root_of(b"table", found.chunks)
    else:
        assert found.chunks is None


def small(path: Path, sign: Any = None) -> bytes:
    """A small file with every addition."""
    rng = np.random.default_rng(0)
    import pint

    u = pint.get_application_registry()
    tree = {
        "t": (np.arange(3, dtype="f4"), None),
        "q": ai.quantize(rng.normal(size=(2, 5)) * u.km, "int4"),
        "h": u.Quantity(np.float64([1, 2]), "degC"),
        "e": np.zeros((0, 3), "i2"),
    }
    ai.save_model(path, tree, {"note": "x", "$n": 2**60}, sign=sign)
    return path.read_bytes()


def state(path: Path, key: Any = None) -> str:
    """Status of a file: that of the report, or the kind of refusal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ai.verify(path, key).status
    except ModelFileError as exc:
        return type(exc).__name__ if str(exc).isprintable() else "unprintable"


def refused(path: Path, key: Any) -> bool:
    """Whether loading is refused."""
    try:
        ai.load_model(path, key)
    except ModelFileError:
        return True
    return False


def whitespace(raw: bytes) -> set[int]:
    """Positions of the padding."""
    n = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + n]
    return {8 + i for i in range(len(text.rstrip(b" ")), n)}


@pytest.mark.parametrize("key", [None, b"0123456789abcdef"], ids=["unsigned", "signed"])
@pytest.mark.parametrize("bit", [0, *(pytest.param(b, marks=pytest.mark.slow) for b in (5, 7))])
def test_every_byte_flipped(key: bytes | None, bit: int, tmp_path: Path) -> None:
    path = tmp_path / "m.apsim"
    raw = small(path, key)
    good = state(path, key)
    assert good == ("intact" if key is None else "authentic")
    blank = whitespace(raw)
    start = 8 + int.from_bytes(raw[:8], "little")
    for i in range(len(raw)):
        changed = bytearray(raw)
        changed[i] ^= 1 << bit
        path.write_bytes(changed)
        found = state(path, key)
        assert found not in ("intact", "authentic", "not-checked") or i in blank, (i, raw[max(i - 20, 0) : i + 20])
        if i >= start:
            assert found == "damaged"
        assert refused(path, key) or i in blank


def test_white_space_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.apsim"
    raw = small(path, b"k" * 16)
    for i in whitespace(raw):
        path.write_bytes(raw[:i] + b"\n" + raw[i + 1 :])
        assert state(path, b"k" * 16) == "authentic"


def test_respaced_reordered_and_escaped(tmp_path: Path) -> None:
    """The header's text may change, its meaning not; key order of the loaded tree stays."""
    path = tmp_path / "m.apsim"
    ai.save_model(
        path, {"é": np.zeros((0,), "f4"), "b": {"z": np.ones(2), "a": np.zeros(3)}, "e": np.zeros(0)}, sign="s"
    )
    header, meta, data = apsim_oracle.split(path)
    order = list(ai.load_model(path))
    whole = {"__metadata__": meta, **header}
    for items, kwargs in ((whole, {"indent": 2}), (dict(reversed(whole.items())), {}), (whole, {"ensure_ascii": True})):
        text = json.dumps(items, **{"ensure_ascii": False, **kwargs}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        assert ai.verify(path, "s").status == "authentic"
        assert list(ai.load_model(path)) == order


@pytest.mark.parametrize("key", [None, pytest.param("s", marks=pytest.mark.slow)])
def test_every_truncation(key: str | None, tmp_path: Path) -> None:
    path = tmp_path / "m.apsim"
    raw = small(path)
    for n in range(len(raw)):
        path.write_bytes(raw[:n])
        found = state(path, key)
        assert found in ("incomplete", "UnknownFormatError"), n
        assert found == "incomplete" or n < 9
    path.write_bytes(raw + b"Z")
    assert state(path, key) == "ModelFileError"


def large(path: Path, **kwargs: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    tree = {
        "a": rng.integers(0, 256, CHUNK // 2, np.uint8),
        "b": rng.integers(0, 256, 2 * CHUNK, np.uint8),
        "c": rng.integers(0, 256, 1000, np.uint8),
        "d": rng.integers(0, 256, CHUNK, np.uint8),
    }
    ai.save_model(path, tree, **kwargs)
    return tree


def flip(path: Path, *positions: int) -> None:
    with open(path, "r+b") as f:
        for p in positions:
            f.seek(p, os.SEEK_END if p < 0 else os.SEEK_SET)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte ^ 1]))


class TestChunks:
    def start(self, path: Path) -> int:
        raw = path.read_bytes()[:8]
        return 8 + int.from_bytes(raw, "little")

    @pytest.mark.parametrize(
        ("places", "ranges", "tensors"),
        [
            ([0], [(0, 1)], [("a", "b")]),
            ([CHUNK], [(1, 2)], [("b",)]),
            ([CHUNK - 1, CHUNK], [(0, 2)], [("a", "b")]),
            ([5, 3 * CHUNK], [(0, 1), (3, 4)], [("a", "b"), ("d",)]),
            ([2 * CHUNK + CHUNK // 2], [(2, 3)], [("b", "c", "d")]),
        ],
    )
    def test_where(self, places: list[int], ranges: list[tuple[int, int]], tensors: list[Any], tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        large(path)
        start = self.start(path)
        size = path.stat().st_size - start
        flip(path, *(start + p for p in places))
        report = ai.verify(path)
        assert report.status == "damaged"
        assert report.part("data").status == "damaged"  # type: ignore[union-attr]
        assert report.part("table").status == "intact"  # type: ignore[union-attr]
        expected = [(start + a * CHUNK, start + min(b * CHUNK, size)) for a, b in ranges]
        assert [(d.begin, d.end) for d in report.damage] == expected
        assert [d.tensors for d in report.damage] == tensors
        for name in tensors[0]:
            assert name in str(report)
        with pytest.raises(VerificationError, match=f"'{tensors[0][0]}'") as caught:
            ai.load_model(path)
        assert caught.value.status == "damaged"

    def test_lazy(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        tree = large(path)
        flip(path, self.start(path) + 3 * CHUNK)
        lazy = ai.load_model(path, verify="lazy")
        for name in "abc":
            np.testing.assert_array_equal(np.asarray(lazy[name]), tree[name])
        for _ in range(2):
            with pytest.raises(VerificationError, match=r"damaged.*'d'"):
                np.asarray(lazy["d"])

    def test_lazy_checks_metadata_and_table_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        large(path)
        raw = path.read_bytes()
        for old, new in ((b'"apsi_inspect/', b'"apsi_inspecT/'), (b'"c":{"dtype":"U8"', b'"c":{"dtype":"I8"')):
            assert raw.count(old) == 1
            path.write_bytes(raw.replace(old, new))
            with pytest.raises(VerificationError):
                ai.load_model(path, verify="lazy")
            ai.load_model(path, verify=False)

    def test_lazy_of_a_small_file_is_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        small(path)
        flip(path, -1)
        with pytest.raises(VerificationError):
            ai.load_model(path, verify="lazy")

    def test_not_verified(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        small(path)
        flip(path, -1)
        ai.load_model(path, verify=False)
        with pytest.raises(VerificationError):
            ai.load_model(path, key="s", verify=False)  # a key turns verification on

    def test_full_streams_too(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        large(path)
        seen: list[tuple[int, int]] = []
        assert ai.verify(path, full=True, progress=lambda a, b: seen.append((a, b))).status == "intact"
        size = path.stat().st_size - self.start(path)
        assert seen[-1] == (2 * size, 2 * size)
        header, meta, data = apsim_oracle.split(path)
        meta["sha256"] = "0" * 64  # the chunks still fit
        del meta["meta_sha256"]
        meta["meta_sha256"] = hashlib.sha256(apsim_oracle.jcs(meta)).hexdigest()
        text = json.dumps({"__metadata__": meta, **header}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        assert ai.verify(path).status == "intact"
        assert ai.verify(path, full=True).status == "damaged"

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_threads(self, threads: int, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        large(path)
        assert ai.verify(path, threads=threads).status == "intact"

    def test_file_that_shrinks(self, tmp_path: Path) -> None:
        path = tmp_path / "m.apsim"
        large(path)
        with ai.open(path) as m:
            m["c"].raw()
            os.truncate(path, path.stat().st_size - 4096)
            with pytest.raises(TruncatedFileError):
                m.verify()

    def test_file_that_is_replaced(self, tmp_path: Path) -> None:
        """Verified and loaded are the same bytes, whatever happens to the name."""
        path, other = tmp_path / "m.apsim", tmp_path / "o.apsim"
        tree = large(path, sign="s")
        ai.save_model(other, {n: np.zeros_like(a) for n, a in tree.items()})
        loaded = ai.load_model(path, key="s", verify="lazy")
        os.replace(other, path)
        np.testing.assert_array_equal(np.asarray(loaded["d"]), tree["d"])


def test_unknown_fields_are_covered(tmp_path: Path) -> None:
    path = tmp_path / "m.apsim"
    raw = small(path)
    header, meta, data = apsim_oracle.split(path)
    name = next(iter(header))
    for value in (True, 2**60, [[[1.5]]], {"a": None}):
        changed = {**header, name: {**header[name], "transpose": value}}
        text = json.dumps({"__metadata__": meta, **changed}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        assert state(path) in ("damaged", "ModelFileError")
    assert raw


@pytest.mark.parametrize("name", ["data_flipped", "units_edited"])
def test_golden_damaged(name: str, data: Path) -> None:
    expected = json.loads((data / "golden/bad/expected.json").read_text())[f"{name}.apsim"]
    report = ai.verify(data / "golden/bad" / f"{name}.apsim")
    assert report.status == "damaged"
    assert [p.name for p in report.parts if p.status == "damaged"] == [expected.removeprefix("damaged: ")]


@pytest.mark.parametrize(
    "name", ["meta_digest_dropped", "meta_digest_renamed", "signer_added", "version_2", "scale_missing"]
)
def test_golden_refused(name: str, data: Path) -> None:
    path = data / "golden/bad" / f"{name}.apsim"
    for call in (ai.open, ai.verify, ai.load_model, lambda p: ai.load_model(p, verify=False)):
        with pytest.raises(ModelFileError, match=f"{name}.apsim: "):
            call(path)


def test_memory_of_verifying_and_saving(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    path = tmp_path / "m.apsim"
    ai.save_model(path, {f"w{i}": np.zeros(1 << 25, np.uint8) for i in range(8)})  # 256 MiB
    code = "print(apsi_inspect.verify(sys.argv[1]).status)"
    printed, grew = measured(code, path)
    assert printed == "intact"
    assert grew < 64
    code = """
import numpy as np
from apsi_inspect.ops import save
a = np.ones((5120, 4096), np.float32)
tree = {"plain": a, "fortran": a.T, "big": a.astype(">f4"), "strided": a[:, ::2]}
start = peak()
save.save_model(sys.argv[1], tree)
"""
    _, grew = measured(code, tmp_path / "n.apsim")
    assert grew < 64


def test_signed_over_golden_bytes(data: Path) -> None:
    """Signatures of the independent implementation are authentic for us."""
    golden = data / "golden"
    assert ai.verify(golden / "signed_secret.apsim", "team secret").status == "authentic"
    assert ai.verify(golden / "signed_bytes.apsim", bytes(range(32))).status == "authentic"
    assert ai.verify(golden / "sharded/model.apsim.index.json", "team secret").status == "authentic"
    apsim_oracle.check_signed(golden / "signed_secret.apsim", "team secret")
    apsim_oracle.check_sharded(golden / "sharded/model.apsim.index.json", "team secret")
    assert signer(Key("team secret"), bytes(range(16))).key == apsim_oracle.key_of(
        "team secret", {"name": "scrypt", "n": 32768, "r": 8, "p": 1, "salt": bytes(range(16)).hex()}
    )
