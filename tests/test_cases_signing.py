"""The signing family of the bank of cases (`sg-`): each is carried out as its steps say, under its id."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pint
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, ValueRefusedError, VerificationError
from apsi_inspect.integrity import signing

from . import apsim_oracle
from .case_steps import CASES, Scripts
from .mutations import MUTATIONS, mutate
from .test_cases import missing
from .test_signing import shapes_of

steps = Scripts("sg-")
KEY = "correct horse battery"
CHANGED = {id: c for id, c in steps.cases.items() if "mutation" in c["expect"]}


@pytest.fixture(autouse=True)
def derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same secret and salt give the same key: each is derived once, as it takes a tenth of a second."""
    monkeypatch.setattr(hashlib, "scrypt", functools.cache(hashlib.scrypt))


@pytest.mark.parametrize("case", steps.cases.values(), ids=lambda c: c["id"])
def test_case(case: dict[str, Any], tmp_path: Path) -> None:
    steps.scripts[case["id"]](case, tmp_path)


def saved(source: Path, path: Path, key: Any, units: dict[str, str] | None = None, **kwargs: Any) -> Path:
    """A plain safetensors file saved as a signed .apsim file with the same tensors and metadata."""
    tree = ai.load_safetensors(source)
    for name, unit in (units or {}).items():
        tree[name]["w"] = pint.get_application_registry().Quantity(tree[name]["w"], unit)
    with ai.open(source) as model:
        metadata = dict(model.metadata) if source.suffix == ".safetensors" else None
    return Path(ai.save_model(path, tree, metadata, sign=key, **kwargs))


def refused(path: Path, key: Any) -> str:
    """What verifying and loading say where all of them refuse."""
    said = []
    try:
        report = ai.verify(path, key)
    except ModelFileError as exc:
        said.append(str(exc))
    else:
        assert not report.ok
        said.append(str(report))
    for mode in (True, "lazy"):
        with pytest.raises(ModelFileError) as caught:
            ai.load_model(path, key=key, verify=mode)
        said.append(str(caught.value))
    return "\n".join(said)


def state(path: Path) -> str:
    """The status without a key, or "refused"."""
    try:
        return ai.verify(path).status
    except ModelFileError:
        return "refused"


@steps(*(id for id in CHANGED if id not in ("sg-order", "sg-strip-hmac")))
def changed(case: dict[str, Any], folder: Path) -> None:
    signed, path = saved(CASES / case["entry"], folder / "signed.apsim", KEY, {"enc": "m", "dec": "mm"}), folder / "x"
    for redigest in (False, True):
        mutate(case["expect"]["mutation"], signed, path, redigest)
        assert not missing(refused(path, KEY), case["expect"]["error_mentions"])
        assert state(path) in ("intact", "refused") if redigest else state(path) != "authentic"
    assert ai.verify(signed, KEY).status == "authentic"


@steps("sg-order")
def order(case: dict[str, Any], folder: Path) -> None:
    """The order of the header means nothing: neither the tree nor the table follows it."""
    signed, path = saved(CASES / case["entry"], folder / "signed.apsim", KEY, {"enc": "m", "dec": "mm"}), folder / "x"
    mutate("reorder", signed, path)
    assert ai.verify(path, KEY).status == "authentic"
    one, other = ai.load_model(signed, key=KEY), ai.load_model(path, key=KEY)
    assert list(one) == list(other)
    assert [list(one[k]) for k in ("enc", "dec")] == [list(other[k]) for k in ("enc", "dec")]
    with ai.open(signed) as a, ai.open(path) as b:
        assert list(a) == list(b)
        assert list(a.table.frame["name"]) == list(b.table.frame["name"])


@steps("sg-strip-hmac")
def strip(case: dict[str, Any], folder: Path) -> None:
    signed, path = saved(CASES / case["entry"], folder / "signed.apsim", KEY, {"enc": "m", "dec": "mm"}), folder / "x"
    mutate("strip-hmac", signed, path)
    assert ai.verify(path, KEY).status == case["expect"]["verify"] == "unsigned"
    assert not missing(refused(path, KEY), case["expect"]["error_mentions"])
    assert state(path) == "intact"


@steps("sg-key-prefix")
def key_prefix(case: dict[str, Any], folder: Path) -> None:
    long = b"x" * 64 + b"y"
    path = saved(CASES / case["entry"], folder / "m.apsim", long)
    for other in (b"x" * 64 + b"z", hashlib.sha256(long).digest()):
        assert ai.verify(path, other).status == "other-key"
        assert "another key" in refused(path, other)
    assert ai.verify(path, long).status == "authentic"


@steps("sg-key-empty")
def key_empty(case: dict[str, Any], folder: Path) -> None:
    """Empty and unset keys are refused; None is documented to be no key, and what it writes is unsigned."""
    plain, path = CASES / case["entry"], folder / "m.apsim"
    for empty in ("", b""):
        with pytest.raises(ValueRefusedError) as caught:
            saved(plain, path, empty)
        assert not missing(str(caught.value), case["expect"]["error_mentions"])
    assert not list(folder.iterdir())
    argv = [sys.executable, "-m", "apsi_inspect", "model", "convert", str(plain), str(path), "--key-env", "APSI_UNSET"]
    env = {k: v for k, v in os.environ.items() if k != "APSI_UNSET"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert not missing(done.stderr, case["expect"]["error_mentions"])
    assert not path.exists()
    assert ai.verify(saved(plain, path, None), KEY).status == "unsigned"


@steps("sg-key-leak")
def key_leak(case: dict[str, Any], folder: Path) -> None:
    secret, log = "APSI-KEY-do-not-leak", io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.DEBUG)
    try:
        for shard in (None, 64):
            path = saved(CASES / case["entry"], folder / f"m{shard}.apsim", secret, shard=shard)
            key = signing.Key(secret)
            for thing in (ai.verify(path, secret), key, signing.signer(key), ai.open(path)):
                print(repr(thing), str(thing), file=log)
            with pytest.raises(VerificationError) as caught:
                ai.load_model(path, key=secret + "!")
            print("".join(traceback.format_exception(caught.value)), vars(caught.value), file=log)
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(level)
    everything = log.getvalue().encode() + b"".join(p.read_bytes() for p in folder.iterdir())
    assert sum(shape in everything for shape in shapes_of(secret.encode())) == case["expect"]["found"] == 0


@steps("sg-astral")
def astral(case: dict[str, Any], folder: Path) -> None:
    path = saved(CASES / case["entry"], folder / "m.apsim", KEY)
    assert ai.verify(path, KEY).status == "authentic"
    apsim_oracle.check_signed(path, KEY)
    with ai.open(path) as model, ai.open(CASES / case["entry"]) as plain:
        assert set(model) == set(plain)


@steps("sg-no-tensors")
def no_tensors(case: dict[str, Any], folder: Path) -> None:
    for file in case["files"]:
        path = saved(CASES / file, folder / "m.apsim", KEY)
        assert ai.verify(path, KEY).status == "authentic"
        apsim_oracle.check_signed(path, KEY)
        raw = path.read_bytes()
        path.write_bytes(raw.replace(b"apsi_inspect/", b"apsi_insqect/"))
        assert raw != path.read_bytes()
        assert "metadata" in refused(path, KEY)


@steps("sg-verify-then-load")
def verify_then_load(case: dict[str, Any], folder: Path) -> None:
    """What was verified is the open file; another one put under its name is not read through it."""
    right = np.asarray(ai.load_safetensors(CASES / case["entry"]).enc.w)
    for mode in (True, "lazy", "opened"):
        path = saved(CASES / case["entry"], folder / "m.apsim", KEY)
        ai.save_model(folder / "other.apsim", {"enc": {"w": right + 1}})
        if mode == "opened":
            model = ai.open(path)
            assert model.verify(KEY).status == "authentic"
            os.replace(folder / "other.apsim", path)
            assert np.array_equal(np.asarray(model["enc.w"]), right)
            model.close()
        else:
            loaded = ai.load_model(path, key=KEY, verify=mode)
            os.replace(folder / "other.apsim", path)
            assert np.array_equal(loaded.enc.w, right)


@steps(*(id for id in steps.cases if id.startswith("sg-pair-")))
def pair(case: dict[str, Any], folder: Path) -> None:
    """Two files that must not have one digest: nor does the signature of the one fit the other."""
    one, other = (saved(CASES / f, folder / f"{i}.apsim", KEY) for i, f in enumerate(case["files"]))
    (_, a, _), (table, b, data) = apsim_oracle.check(one), apsim_oracle.check(other)
    assert (a["sha256"], a["meta_sha256"]) != (b["sha256"], b["meta_sha256"])
    signed = json.dumps({"__metadata__": {**b, "signature": a["signature"]}, **table}, ensure_ascii=False).encode()
    other.write_bytes(len(signed).to_bytes(8, "little") + signed + data)
    assert ai.verify(other, KEY).status == "damaged"
    assert "after it was signed" in refused(other, KEY)


def sets(case: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Two checkpoints of two shards each, of the same names and sizes, signed with one key; their indexes."""
    source = (CASES / case["entry"]).parent.parent
    out = []
    for v in ("v1", "v2"):
        (folder / v).mkdir()
        out.append(saved(source / v / "model.safetensors.index.json", folder / v / "model.apsim", KEY, shard=32))
        assert ai.verify(out[-1], KEY).status == "authentic"
        apsim_oracle.check_sharded(out[-1], KEY)
    return out[0], out[1]


@steps("sg-set-mix")
def set_mix(case: dict[str, Any], folder: Path) -> None:
    one, other = sets(case, folder)
    shutil.copy(other.parent / "model-00002-of-00002.apsim", one.parent)
    said = refused(one, KEY)
    assert "model-00002-of-00002.apsim" in said
    assert "shard" in said


@steps("sg-set-swap")
def set_swap(case: dict[str, Any], folder: Path) -> None:
    one, _ = sets(case, folder)
    a, b = (one.parent / f"model-0000{i}-of-00002.apsim" for i in (1, 2))
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)
    refused(one, KEY)
    text = one.read_text().replace("00001-of", "X").replace("00002-of", "00001-of").replace("X", "00002-of")
    one.write_text(text)
    refused(one, KEY)


@steps("sg-set-extra")
def set_extra(case: dict[str, Any], folder: Path) -> None:
    one, other = sets(case, folder)
    shutil.copy(other.parent / "model-00002-of-00002.apsim", one.parent / "model-00003-of-00002.apsim")
    (one.parent / "evil.py").write_text("raise SystemExit")
    report = ai.verify(one, KEY)
    assert report.status == "authentic"
    assert "model-00003-of-00002.apsim" in str(report)


@steps("sg-set-escape")
def set_escape(case: dict[str, Any], folder: Path) -> None:
    one, _ = sets(case, folder)
    document = json.loads(one.read_text())
    wrong = "../v2/model-00002-of-00002.apsim"
    document["metadata"]["shards"][1]["file"] = wrong
    document["weight_map"] = {k: (wrong if "00002-of" in v else v) for k, v in document["weight_map"].items()}
    for redigest in (False, True):
        if redigest:
            covered = {k: v for k, v in document["metadata"].items() if k not in ("index_sha256", "signature")}
            document["metadata"]["index_sha256"] = hashlib.sha256(apsim_oracle.jcs(covered)).hexdigest()
        one.write_text(json.dumps(document))
        assert not missing(refused(one, KEY), case["expect"]["error_mentions"])


def test_every_case_and_every_mutation_is_there() -> None:
    assert steps.scripts.keys() == steps.cases.keys()
    assert len(steps.cases) == 30
    assert {c["expect"]["mutation"] for c in CHANGED.values()} == MUTATIONS.keys()
