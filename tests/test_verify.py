"""`verify`: the states of every part, shards in both directions, mutations, the command."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ModelFileError, VerificationError
from apsi_inspect.reports import Part, Report

from . import apsim_oracle

KEY = b"0123456789abcdef"


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=10), "b": rng.normal(size=10), "q": ai.quantize(rng.normal(size=(2, 8)), "int8")}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def statuses(report: Report) -> dict[str, str]:
    return {p.name: p.status for p in report.parts}


class TestStates:
    def test_intact(self, tmp_path: Path) -> None:
        report = ai.verify(ai.save_model(tmp_path / "m", tree()))
        assert statuses(report) == {
            "structure": "intact", "table": "intact", "data": "intact", "metadata": "intact", "signature": "unsigned",
        }  # fmt: skip
        assert (report.status, report.ok, report.with_key, report.key_id) == ("intact", True, False, None)
        assert report.raise_if_failed() is report

    def test_authentic(self, tmp_path: Path) -> None:
        report = ai.verify(ai.save_model(tmp_path / "m", tree(), sign=KEY), KEY)
        assert (report.status, report.ok, report.with_key) == ("authentic", True, True)
        assert report.raise_if_failed() is report

    def test_base_profile(self, data: Path) -> None:
        report = ai.verify(data / "golden/base_profile.apsim")
        assert report.status == "intact"
        assert report.part("metadata") == Part(
            "metadata", "not-checked", "no digest covers the metadata (base profile)"
        )
        assert ai.verify(data / "golden/base_profile.apsim", KEY).status == "unsigned"

    def test_formats_without_digests(self, tmp_path: Path) -> None:
        from apsi_inspect import samples

        samples.write(tmp_path, ["tiny-llama.gguf"])
        for path in (tmp_path / "tiny-llama.gguf", ai.save_safetensors(tmp_path / "m.safetensors", {"a": np.zeros(1)})):
            report = ai.verify(path)
            assert (report.status, report.ok) == ("not-checked", True)
            report = ai.verify(path, KEY)
            assert (report.status, report.ok) == ("not-checked", False)
            assert "no digests" in report.reason or "digests" in report.reason
            with pytest.raises(VerificationError):
                report.raise_if_failed()

    def test_mark_removed(self, tmp_path: Path) -> None:
        """An .apsim file whose mark was changed is no plain safetensors file without digests."""
        path = tmp_path / "m.apsim"
        ai.save_model(path, tree(), sign=KEY)
        path.write_bytes(path.read_bytes().replace(b'"apsi-model"', b'"apsi-mode1"'))
        for key in (None, KEY):
            assert ai.verify(path, key).status == "damaged"
        with pytest.raises(ModelFileError, match=r"not \.apsim"):
            ai.load_model(path)

    def test_truncated(self, tmp_path: Path) -> None:
        path = tmp_path / "m"
        ai.save_model(path, tree())
        path.write_bytes(path.read_bytes()[:-1])
        report = ai.verify(path)
        assert (report.status, report.ok) == ("incomplete", False)
        with pytest.raises(VerificationError) as caught:
            report.raise_if_failed()
        assert caught.value.status == "incomplete"

    def test_method_of_a_model(self, tmp_path: Path) -> None:
        path = ai.save_model(tmp_path / "m", tree(), sign=KEY)
        with ai.open(path) as m:
            assert m.verify().status == "intact"
            assert m.verify(KEY).status == "authentic"
            os.replace(path, tmp_path / "elsewhere")
            assert m.verify(KEY).status == "authentic"

    def test_report_is_frozen_and_shows(self, tmp_path: Path) -> None:
        report = ai.verify(ai.save_model(tmp_path / "<b>$x$.apsim", tree(), sign=KEY))
        with pytest.raises(AttributeError):
            report.status = "authentic"
        html = report._repr_html_()
        assert "<b>$x$" not in html
        for fact in ("intact", "not-checked", str(report.key_id), "tensors"):
            assert fact in html
            assert fact in str(report)
        document = json.loads(json.dumps(report.to_dict()))
        assert document["schema_version"] == 1
        assert [p["status"] for p in document["parts"]] == [p.status for p in report.parts]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A signed checkpoint of three shards."""
    (tmp_path / "v1").mkdir()
    return Path(ai.save_model(tmp_path / "v1" / "m.apsim", tree(), {"n": 1}, sign=KEY, shard=90))


def other(shards: Path) -> Path:
    """Another checkpoint of the same names and sizes, signed with the same key."""
    (shards.parent.parent / "v2").mkdir()
    return Path(ai.save_model(shards.parent.parent / "v2" / "m.apsim", tree(1), {"n": 1}, sign=KEY, shard=90))


class TestShards:
    def refused(self, index: Path, status: str, *words: str) -> Report:
        report = ai.verify(index, KEY)
        assert report.status == status, report
        assert not report.ok
        for word in words:
            assert word in str(report)
        for lazy in (True, "lazy", False):
            with pytest.raises(ModelFileError):
                ai.load_model(index, key=KEY, verify=lazy)
        return report

    def test_good(self, shards: Path) -> None:
        assert len(list(shards.parent.iterdir())) == 4
        apsim_oracle.check_sharded(shards, KEY)
        for path in (shards, shards.parent, shards.parent / "m.apsim"):
            assert ai.verify(path, KEY).status == "authentic"
            assert ai.verify(path).status == "intact"
        assert ai.open(shards).verify(KEY).status == "authentic"
        for lazy in (True, "lazy", False):
            loaded = ai.load_model(shards, key=KEY, verify=lazy)
            assert np.array_equal(loaded.a, tree()["a"])

    def test_data_of_one(self, shards: Path) -> None:
        path = shards.parent / "m-00002-of-00003.apsim"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        report = self.refused(shards, "damaged", "m-00002-of-00003.apsim")
        assert statuses(report)["shard m-00002-of-00003.apsim"] == "damaged"
        assert statuses(report)["shard m-00001-of-00003.apsim"] == "intact"

    def test_missing(self, shards: Path) -> None:
        (shards.parent / "m-00003-of-00003.apsim").unlink()
        report = self.refused(shards, "incomplete", "m-00003-of-00003.apsim", "missing")
        assert statuses(report)["shard m-00001-of-00003.apsim"] == "intact"

    def test_truncated(self, shards: Path) -> None:
        path = shards.parent / "m-00001-of-00003.apsim"
        path.write_bytes(path.read_bytes()[:-3])
        self.refused(shards, "incomplete", "m-00001-of-00003.apsim")

    def test_mixed(self, shards: Path) -> None:
        shutil.copy(other(shards).parent / "m-00002-of-00003.apsim", shards.parent)
        self.refused(shards, "damaged", "m-00002-of-00003.apsim", "shards of different checkpoints are mixed")

    def test_swapped(self, shards: Path) -> None:
        one, two = (shards.parent / f"m-0000{i}-of-00003.apsim" for i in (1, 2))
        a, b = one.read_bytes(), two.read_bytes()
        one.write_bytes(b)
        two.write_bytes(a)
        self.refused(shards, "damaged", "shards are mixed")
        text = shards.read_text().replace("00001-of", "X").replace("00002-of", "00001-of").replace("X", "00002-of")
        shards.write_text(text)
        self.refused(shards, "damaged")

    def test_other_index(self, shards: Path) -> None:
        shutil.copy(other(shards), shards)
        self.refused(shards, "damaged", "mixed")

    @pytest.mark.parametrize("name", ["../v2/m-00002-of-00003.apsim", "/etc/passwd", "..", "a\\b", "a/b", "", "a:b"])
    def test_paths(self, name: str, shards: Path) -> None:
        other(shards)
        document = json.loads(shards.read_text())
        document["metadata"]["shards"][1]["file"] = name
        document["weight_map"] = {k: (name if "00002" in v else v) for k, v in document["weight_map"].items()}
        shards.write_text(json.dumps(document))
        with pytest.raises(ModelFileError, match=r"path|not allowed|no shard"):
            ai.verify(shards, KEY)
        with pytest.raises(ModelFileError):
            ai.load_model(shards, verify=False)

    def test_extra_file(self, shards: Path) -> None:
        shutil.copy(shards.parent / "m-00002-of-00003.apsim", shards.parent / "m-00004-of-00003.apsim")
        report = ai.verify(shards, KEY)
        assert report.status == "authentic"
        assert "m-00004-of-00003.apsim" in str(report)

    CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {  # noqa: RUF012
        "metadata": lambda d: d["metadata"].update(metadata='{"n":2}'),
        "tree": lambda d: d["metadata"].update(tree='{"$record":[["z","a"],["b","b"],["q","q"]]}'),
        "writer": lambda d: d["metadata"].update(apsi="x/1"),
        "extra": lambda d: d["metadata"].update(more=1),
        "order": lambda d: d["metadata"]["shards"].reverse(),
        "shard gone": lambda d: d["metadata"]["shards"].pop(),
        "total": lambda d: d["metadata"].update(total_size=1),
        "map": lambda d: d["weight_map"].update(a=d["weight_map"]["q"]),
        "map gone": lambda d: d["weight_map"].pop("a"),
        "map more": lambda d: d["weight_map"].update(zz=d["weight_map"]["a"]),
        "no digest": lambda d: d["metadata"].pop("index_sha256"),
        "bad digest": lambda d: d["metadata"].update(index_sha256="0" * 64),
        "field": lambda d: d["metadata"]["signature"].update(signer="me"),
        "mac": lambda d: d["metadata"]["signature"].update(mac="0" * 64),
        "no signature": lambda d: d["metadata"].pop("signature"),
    }

    @pytest.mark.parametrize("what", CHANGES)
    @pytest.mark.parametrize("redigest", [False, True])
    def test_index_changed(self, what: str, redigest: bool, shards: Path) -> None:
        document = json.loads(shards.read_text())
        self.CHANGES[what](document)
        if redigest and what not in ("bad digest", "no digest"):
            covered = {k: v for k, v in document["metadata"].items() if k not in ("index_sha256", "signature")}
            document["metadata"]["index_sha256"] = sha256(apsim_oracle.jcs(covered))
        shards.write_text(json.dumps(document))
        for lazy in (True, "lazy", False):
            with pytest.raises(ModelFileError):
                ai.load_model(shards, key=KEY, verify=lazy)
        try:
            assert not ai.verify(shards, KEY).ok
        except ModelFileError as exc:
            assert type(exc) is not VerificationError  # noqa: PT017

    def test_every_byte_of_the_index(self, shards: Path) -> None:
        raw = shards.read_bytes()
        original = json.loads(raw)
        for i in range(0, len(raw), 1):
            changed = bytearray(raw)
            changed[i] ^= 1
            shards.write_bytes(changed)
            try:
                same = json.loads(changed) == original
            except ValueError:
                same = False
            try:
                ok = ai.verify(shards, KEY).ok
            except ModelFileError:
                ok = False
            assert ok == same, raw[max(0, i - 20) : i + 20]

    def test_link_to_a_shard_is_followed(self, shards: Path) -> None:
        path = shards.parent / "m-00002-of-00003.apsim"
        target = shards.parent.parent / "blob"
        path.rename(target)
        path.symlink_to("../blob")
        assert ai.verify(shards, KEY).status == "authentic"

    def test_duplicate_in_two_shards(self, tmp_path: Path) -> None:
        ai.save_model(tmp_path / "a", {"x": np.zeros(1)})
        (tmp_path / "m.apsim.index.json").write_text("{}")
        with pytest.raises(ModelFileError):
            ai.verify(tmp_path / "m.apsim.index.json")


def apsi(*args: object, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "apsi_inspect", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, input=stdin, env={**os.environ, **(env or {})}, check=False
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    ai.save_model(folder / "good.apsim", tree())
    ai.save_model(folder / "secret.apsim", tree(), sign="team secret")
    ai.save_model(folder / "bytes.apsim", tree(), sign=KEY)
    raw = bytearray((folder / "good.apsim").read_bytes())
    raw[-1] ^= 1
    (folder / "damaged.apsim").write_bytes(raw)
    (folder / "short.apsim").write_bytes(raw[:-4])
    (folder / "strange.bin").write_bytes(b"hello")
    (folder / "key").write_bytes(KEY)
    (folder / "short-key").write_bytes(b"x")
    ai.save_safetensors(folder / "plain.safetensors", {"a": np.zeros(1)})
    return folder


class TestCommand:
    CASES: list[tuple[list[str], int, str]] = [  # noqa: RUF012
        (["good.apsim"], 0, "✓ intact"),
        (["secret.apsim"], 0, "not-checked"),
        (["secret.apsim", "--key", "team secret"], 0, "✓ authentic"),
        (["secret.apsim", "--key", "other"], 1, "other-key"),
        (["bytes.apsim", "--key-file", "key"], 0, "✓ authentic"),
        (["good.apsim", "--key", "x"], 1, "unsigned"),
        (["damaged.apsim"], 1, "✗ damaged"),
        (["short.apsim"], 3, "incomplete"),
        (["plain.safetensors"], 0, "not-checked"),
        (["plain.safetensors", "--key", "x"], 1, "not-checked"),
        (["strange.bin"], 3, ""),
        (["missing"], 3, ""),
        (["good.apsim", "damaged.apsim"], 1, "✗ damaged"),
        (["good.apsim", "strange.bin", "damaged.apsim"], 3, "✗ damaged"),
        (["good.apsim", "--full"], 0, "✓ intact"),
        (["good.apsim", "--key", ""], 2, ""),
        (["good.apsim", "--key-file", "short-key"], 2, ""),
        (["good.apsim", "--key-file", "missing"], 2, ""),
        (["good.apsim", "--key", "a", "--user-key"], 2, ""),
        (["good.apsim", "--key-env", "APSI_NOT_SET"], 2, ""),
        ([], 2, ""),
    ]

    @pytest.mark.parametrize(("args", "code", "text"), CASES, ids=[" ".join(c[0]) for c in CASES])
    def test_exit_codes(self, args: list[str], code: int, text: str, files: Path) -> None:
        done = apsi("model", "verify", *(files / a if (files / a).exists() and a else a for a in args))
        assert done.returncode == code, done.stderr
        assert text in done.stdout
        assert (done.stderr == "") == (code in (0, 1) or "incomplete" in text)
        assert "Traceback" not in done.stderr
        assert "team secret" not in done.stdout + done.stderr

    def test_json(self, files: Path) -> None:
        done = apsi("model", "verify", files / "damaged.apsim", "--json")
        document = json.loads(done.stdout)
        assert (done.returncode, document["status"], document["schema_version"]) == (1, "damaged", 1)
        done = apsi("model", "verify", files / "good.apsim", files / "secret.apsim", "--json", "--key", "team secret")
        assert [d["status"] for d in json.loads(done.stdout)] == ["unsigned", "authentic"]
        assert done.returncode == 1

    @pytest.mark.parametrize("verb", ["verify", "info", "scan"])
    def test_json_of_what_cannot_be_read(self, verb: str, files: Path) -> None:
        """Every path has its document, in order; the message stands on stderr too."""
        done = apsi("model", verb, files / "good.apsim", files / "missing", files / "strange.bin", "--json")
        documents = json.loads(done.stdout)
        assert done.returncode == 3
        assert [d["schema_version"] for d in documents] == [1, 1, 1]
        assert [d["file"] for d in documents] == [str(files / n) for n in ("good.apsim", "missing", "strange.bin")]
        assert documents[1]["error"] == f"{files / 'missing'}: No such file or directory"
        assert documents[1]["error"] in done.stderr
        assert (documents[1]["status"], documents[1]["ok"]) == ("unreadable", False)
        alone = json.loads(apsi("model", verb, files / "missing", "--json").stdout)
        assert alone == documents[1]

    def test_secret_from_the_environment(self, files: Path) -> None:
        done = apsi("model", "verify", files / "secret.apsim", "--key-env", "MY_KEY", env={"MY_KEY": "team secret"})
        assert (done.returncode, "authentic" in done.stdout) == (0, True)

    def test_user_key(self, files: Path, tmp_path: Path) -> None:
        home = {"XDG_CONFIG_HOME": str(tmp_path)}
        done = apsi("key", "path", env=home)
        assert done.stdout.strip() == str(tmp_path / "apsi_inspect" / "signing.key")
        done = apsi("key", "show-id", env=home)
        assert (done.returncode, done.stdout) == (3, "")
        assert "no per-user key yet" in done.stderr
        assert list(tmp_path.iterdir()) == []
        assert apsi("model", "verify", files / "good.apsim", "--user-key", env=home).returncode == 2
        code = "import sys, apsi_inspect as ai; ai.save_model(sys.argv[1], {}, sign=True)"
        subprocess.run([sys.executable, "-c", code, tmp_path / "m"], env={**os.environ, **home}, check=True)
        done = apsi("model", "verify", tmp_path / "m", "--user-key", "--json", env=home)
        assert json.loads(done.stdout)["status"] == "authentic"
        assert apsi("key", "show-id", env=home).stdout.strip() == json.loads(done.stdout)["key_id"]

    def test_stays_light(self, files: Path) -> None:
        code = (
            "import sys; from apsi_inspect.cli import main; main(['model', 'verify', sys.argv[1]]); "
            "print([m for m in ('numpy', 'pandas', 'numba', 'pint', 'rfc8785') if m in sys.modules])"
        )
        args = [sys.executable, "-c", code, str(files / "good.apsim")]
        assert subprocess.run(args, capture_output=True, text=True, check=True).stdout.endswith("[]\n")

    def test_help(self) -> None:
        for command in (["model", "verify"], ["key"], ["key", "path"]):
            assert apsi(*command, "--help").returncode == 0
