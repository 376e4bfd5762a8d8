"""Signatures and keys: every value derived again from the specification; secrets stay secret."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys
import traceback
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, ValueRefusedError, VerificationError
from apsi_inspect.integrity import signing

from . import apsim_oracle

TREE = {"e": np.zeros(0), "w": np.arange(6, dtype="f4")}
KEY = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The per-user key of the tests is not that of the user."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    return folder


KEYS: list[Any] = ["team secret", "é", "é", "🙂" * 40, b"0123456789abcdef", bytes(64), b"x" * 65, bytearray(b"y" * 20)]


@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("shard", [None, 20])
def test_from_the_specification(key: Any, shard: int | None, tmp_path: Path) -> None:
    tree = {**TREE, "v": np.ones(6, "f4")}
    path = Path(ai.save_model(tmp_path / "m.apsim", tree, {"a": 1}, sign=key, shard=shard))
    plain = key if isinstance(key, str) else bytes(key)
    if shard is None:
        apsim_oracle.check_signed(path, plain)
    else:
        apsim_oracle.check_sharded(path, plain)
    assert ai.verify(path, key).status == "authentic"
    assert np.array_equal(ai.load_model(path, key=key).w, TREE["w"])


def test_forms_of_unicode_are_one_secret(tmp_path: Path) -> None:
    ai.save_model(tmp_path / "m", TREE, sign=unicodedata.normalize("NFD", "clé"))
    assert ai.verify(tmp_path / "m", unicodedata.normalize("NFC", "clé")).status == "authentic"


OTHERS: list[tuple[Any, Any]] = [
    ("a", "b"),
    ("a", "a "),
    ("0123456789abcdef", b"0123456789abcdef"),
    (b"0123456789abcdef", "0123456789abcdef"),
    (b"x" * 64 + b"y", b"x" * 64 + b"z"),
    (b"x" * 65, hashlib.sha256(b"x" * 65).digest()),
    (b"x" * 20, b"x" * 20 + bytes(10)),
]


@pytest.mark.parametrize(("one", "other"), OTHERS, ids=repr)
def test_another_key(one: Any, other: Any, tmp_path: Path) -> None:
    ai.save_model(tmp_path / "m", TREE, sign=one)
    report = ai.verify(tmp_path / "m", other)
    assert report.status == "other-key"
    assert not report.ok
    for lazy in (True, "lazy", False):
        with pytest.raises(VerificationError, match="another key") as caught:
            ai.load_model(tmp_path / "m", key=other, verify=lazy)
        assert caught.value.status == "other-key"


def test_unsigned(tmp_path: Path) -> None:
    for shard in (None, 20):
        path = ai.save_model(tmp_path / "m.apsim", {**TREE, "v": np.ones(6, "f4")}, shard=shard)
        assert ai.verify(path).status == "intact"
        assert ai.verify(path).ok
        report = ai.verify(path, KEY)
        assert (report.status, report.ok) == ("unsigned", False)
        for lazy in (True, "lazy", False):
            with pytest.raises(VerificationError, match="not signed") as caught:
                ai.load_model(path, key=KEY, verify=lazy)
            assert caught.value.status == "unsigned"


def test_signed_without_a_key_is_intact(tmp_path: Path) -> None:
    ai.save_model(tmp_path / "m", TREE, sign="k")
    report = ai.verify(tmp_path / "m")
    assert report.status == "intact"
    assert report.part("signature").status == "not-checked"  # type: ignore[union-attr]
    assert report.key_id == json.loads(apsim_oracle.check(tmp_path / "m")[1]["signature"])["key_id"]


def redigest(path: Path, change: Any) -> None:
    """Change a file as somebody without the key can: all digests are right again."""
    header, meta, data = apsim_oracle.split(path)
    header, meta, data = change(header, meta, data)
    meta["sha256"] = hashlib.sha256(apsim_oracle.jcs(header) + data).hexdigest()
    covered = {k: v for k, v in meta.items() if k not in ("meta_sha256", "signature")}
    meta["meta_sha256"] = hashlib.sha256(apsim_oracle.jcs(covered)).hexdigest()
    text = json.dumps({"__metadata__": meta, **header}, ensure_ascii=False).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


CHANGES: dict[str, Any] = {
    "data": lambda h, m, d: (h, m, bytes([d[0] ^ 1]) + d[1:]),
    "name": lambda h, m, d: ({("v" if k == "w" else k): v for k, v in h.items()}, m, d),
    "shape": lambda h, m, d: ({**h, "w": {**h["w"], "shape": [2, 3]}}, m, d),
    "dtype": lambda h, m, d: ({**h, "w": {**h["w"], "dtype": "I32"}}, m, d),
    "metadata": lambda h, m, d: (h, {**m, "metadata": '{"a":2}'}, d),
    "metadata gone": lambda h, m, d: (h, {k: v for k, v in m.items() if k != "metadata"}, d),
    "unit": lambda h, m, d: (h, {**m, "units": '{"w":[1,0,0,0,0,0,0]}'}, d),
    "key": lambda h, m, d: (h, {**m, "more": "x"}, d),
    "field": lambda h, m, d: ({**h, "w": {**h["w"], "transpose": True}}, m, d),
    "tensor": lambda h, m, d: (
        {**h, "x": {"dtype": "U8", "shape": [1], "data_offsets": [len(d), len(d) + 1]}},
        m,
        d + b"Z",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_and_redigested(what: str, tmp_path: Path) -> None:
    """Without a key the file is intact (anyone can recompute digests), with it, changed after signing."""
    path = tmp_path / "m"
    ai.save_model(path, TREE, {"a": 1}, sign=KEY)
    redigest(path, CHANGES[what])
    assert ai.verify(path).status == "intact"
    report = ai.verify(path, KEY)
    assert report.status == "damaged"
    assert "after it was signed" in report.reason
    for lazy in (True, "lazy", False):
        with pytest.raises(VerificationError, match="after it was signed"):
            ai.load_model(path, key=KEY, verify=lazy)


FORMS: dict[str, Any] = {
    "empty mac": lambda s: {**s, "mac": ""},
    "short mac": lambda s: {**s, "mac": s["mac"][:-2]},
    "upper mac": lambda s: {**s, "mac": s["mac"].upper()},
    "non-ASCII mac": lambda s: {**s, "mac": s["mac"][:-1] + "é"},
    "alg none": lambda s: {**s, "alg": "none"},
    "alg md5": lambda s: {**s, "alg": "HMAC-MD5"},
    "no mac": lambda s: {k: v for k, v in s.items() if k != "mac"},
    "signer": lambda s: {**s, "signer": "me"},
    "cheap kdf": lambda s: {**s, "kdf": {**s["kdf"], "n": 2}},
    "huge kdf": lambda s: {**s, "kdf": {**s["kdf"], "n": 2**40}},
    "bool kdf": lambda s: {**s, "kdf": {**s["kdf"], "p": True}},
    "float kdf": lambda s: {**s, "kdf": {**s["kdf"], "r": 8.0}},
    "other kdf": lambda s: {**s, "kdf": {**s["kdf"], "name": "pbkdf2"}},
    "short salt": lambda s: {**s, "kdf": {**s["kdf"], "salt": "00"}},
    "kdf field": lambda s: {**s, "kdf": {**s["kdf"], "x": 1}},
    "upper id": lambda s: {**s, "key_id": s["key_id"].upper().replace("0", "A")},
    "list": lambda s: [s],
    "text": lambda s: "signature",
    "null": lambda s: None,
}


@pytest.mark.parametrize("what", FORMS)
@pytest.mark.parametrize("key", [None, "k"])
def test_form_of_the_signature(what: str, key: str | None, tmp_path: Path) -> None:
    path = tmp_path / "m"
    ai.save_model(path, TREE, sign="k")
    header, meta, data = apsim_oracle.split(path)
    meta["signature"] = json.dumps(FORMS[what](json.loads(meta["signature"])))
    text = json.dumps({"__metadata__": meta, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ModelFileError, match="signature"):
        ai.verify(path, key)


@pytest.mark.parametrize("what", ["zero mac", "other salt", "no kdf", "other id"])
def test_content_of_the_signature(what: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    ai.save_model(path, TREE, sign="k")
    header, meta, data = apsim_oracle.split(path)
    s = json.loads(meta["signature"])
    if what == "zero mac":
        s["mac"] = "0" * 64
    elif what == "other salt":
        s["kdf"]["salt"] = "0" * 32
    elif what == "no kdf":
        s["kdf"] = None
    else:
        s["key_id"] = "0" * 16
    meta["signature"] = json.dumps(s)
    text = json.dumps({"__metadata__": meta, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert ai.verify(path, "k").status == ("damaged" if what == "zero mac" else "other-key")


def test_transplanted_signature(tmp_path: Path) -> None:
    for name, tree in (("a", TREE), ("b", {**TREE, "w": -TREE["w"]})):
        ai.save_model(tmp_path / name, tree, sign=KEY)
    (_, a, _), (header, b, data) = (apsim_oracle.split(tmp_path / n) for n in "ab")
    b["signature"] = a["signature"]
    text = json.dumps({"__metadata__": b, **header}).encode()
    (tmp_path / "b").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert ai.verify(tmp_path / "b", KEY).status == "damaged"


PAIRS: dict[str, tuple[Any, Any]] = {
    "boundary": ({"a": np.zeros(3, "u1"), "b": np.zeros(1, "u1")}, {"a": np.zeros(2, "u1"), "b": np.zeros(2, "u1")}),
    "zero sign": ({"a": np.float32([0.0])}, {"a": np.float32([-0.0])}),
    "nfc": ({unicodedata.normalize("NFC", "é"): np.zeros(1)}, {unicodedata.normalize("NFD", "é"): np.zeros(1)}),
    "name and dtype": ({"aI": np.zeros(1, "i1")}, {"a": np.zeros(1, "i1")}),
}


@pytest.mark.parametrize("what", PAIRS)
def test_pairs_that_must_differ(what: str, tmp_path: Path) -> None:
    digests = []
    for i, tree in enumerate(PAIRS[what]):
        ai.save_model(tmp_path / str(i), tree, sign=b"k" * 16)
        digests.append(apsim_oracle.check(tmp_path / str(i))[1]["sha256"])
    assert digests[0] != digests[1]


def test_metadata_that_forges_a_second_key(tmp_path: Path) -> None:
    found = []
    for i, meta in enumerate(({"a": "1\nb=2"}, {"a": "1", "b": "2"})):
        ai.save_model(tmp_path / str(i), TREE, meta, sign=b"k" * 16)
        found.append(apsim_oracle.check(tmp_path / str(i))[1]["meta_sha256"])
    assert found[0] != found[1]


class TestBadKeys:
    @pytest.mark.parametrize("bad", ["", b"", b"x" * 15, 7, 1.5, ["k"], "\ud800"], ids=repr)
    def test_refused(self, bad: Any, tmp_path: Path) -> None:
        path = tmp_path / "m"
        ai.save_model(path, TREE, sign="k")
        before = path.read_bytes()
        for call in (
            lambda: ai.save_model(path, TREE, sign=bad),
            lambda: ai.load_model(path, key=bad),
            lambda: ai.load_model(path, key=bad, verify=False),
            lambda: ai.verify(path, bad),
        ):
            with pytest.raises(ValueRefusedError, match="key"):
                call()
        assert path.read_bytes() == before

    def test_false_is_no_key(self, tmp_path: Path) -> None:
        ai.save_model(tmp_path / "m", TREE, sign=False)
        assert ai.verify(tmp_path / "m", False).status == "intact"


class TestUserKey:
    def test_life(self, home: Path, tmp_path: Path) -> None:
        path = Path(signing.user_key_path())
        assert home in path.parents
        ai.save_model(tmp_path / "u", TREE, sign="k")
        with pytest.raises(ValueRefusedError, match="no per-user key yet"):
            ai.verify(tmp_path / "u", True)
        assert not path.exists()
        ai.save_model(tmp_path / "m", TREE, sign=True)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(path.read_bytes()) == 32
        apsim_oracle.check_signed(tmp_path / "m", path.read_bytes())
        assert ai.verify(tmp_path / "m", True).status == "authentic"
        assert ai.verify(tmp_path / "m", path.read_bytes()).status == "authentic"
        assert ai.verify(tmp_path / "u", True).status == "other-key"
        assert [p.name for p in path.parent.iterdir()] == ["signing.key"]
        ai.save_model(tmp_path / "n", TREE, sign=True)
        assert ai.verify(tmp_path / "n", path.read_bytes()).status == "authentic"

    def test_umask_does_not_matter(self) -> None:
        old = os.umask(0)
        try:
            signing.user_key(create=True)
        finally:
            os.umask(old)
        assert stat.S_IMODE(os.stat(signing.user_key_path()).st_mode) == 0o600

    def test_readable_by_others(self) -> None:
        signing.user_key(create=True)
        os.chmod(signing.user_key_path(), 0o644)
        with pytest.raises(ValueRefusedError, match="chmod 600"):
            signing.user_key()

    @pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
    def test_damaged(self, content: bytes) -> None:
        signing.user_key(create=True)
        Path(signing.user_key_path()).write_bytes(content)
        with pytest.raises(ValueRefusedError, match="no per-user key"):
            signing.user_key(create=True)

    def test_made_by_two_at_once(self, home: Path) -> None:
        code = "from apsi_inspect.integrity import signing; print(signing.user_key_id(create=True))"
        running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
        ids = {p.communicate()[0].strip() for p in running}
        assert len(ids) == 1
        assert ids == {signing.user_key_id()}


def shapes_of(key: bytes) -> list[bytes]:
    return [key, key.hex().encode(), base64.b64encode(key), key[::-1]]


@pytest.mark.parametrize("key", ["APSI-KEY-do-not-leak", b"APSI-BYTES-do-not-leak"])
def test_key_is_written_nowhere(key: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = key.encode() if isinstance(key, str) else key
    caplog.set_level(logging.DEBUG)
    seen = io.StringIO()
    tree = {**TREE, "v": np.ones(6, "f4")}
    for shard in (None, 20):
        path = ai.save_model(tmp_path / "m.apsim", tree, {"a": 1}, sign=key, shard=shard)
        report = ai.verify(path, key)
        k = signing.Key(key)
        for thing in (report, k, signing.signer(k), ai.open(path), report._repr_html_(), report.to_dict(), str(report)):
            print(repr(thing), str(thing), file=seen)
        bad = tmp_path / "bad.apsim"
        shutil.copy(next(tmp_path.glob("m*.apsim")), bad)
        with open(bad, "r+b") as f:
            f.seek(-1, 2)
            f.write(b"\xff")
        for call in (lambda b=bad: ai.load_model(b, key=key), lambda p=path: ai.load_model(p, key=key + key)):
            try:
                call()
            except ModelFileError as exc:
                print("".join(traceback.format_exception(exc)), exc._repr_html_(), vars(exc), file=seen)
    everything = seen.getvalue().encode() + caplog.text.encode()
    everything += b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    for shape in shapes_of(raw):
        assert shape not in everything
    derived = signing.signer(signing.Key(key)).key
    assert derived.hex().encode() not in everything


def test_keys_are_not_copied_out() -> None:
    k = signing.Key("s")
    with pytest.raises(TypeError):
        pickle.dumps(k)
    with pytest.raises(TypeError):
        copy.copy(k)


def test_comparison_is_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = signing.hmac.compare_digest
    monkeypatch.setattr(signing.hmac, "compare_digest", lambda a, b: (seen.append(len(a)), real(a, b))[1])
    ai.save_model(tmp_path / "m", TREE, sign="k")
    ai.verify(tmp_path / "m", "k")
    assert seen == [16, 32]
