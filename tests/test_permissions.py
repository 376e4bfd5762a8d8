"""What `permissions` allow: the real place of a file counts, and every restriction in force must agree."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.errors import ValueRefusedError
from apsi_inspect.permit import check_read, check_write


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`in/a.safetensors`, `secret/b.safetensors` and an empty `out`, with the working folder beside them."""
    for name in ("in", "secret", "out"):
        (tmp_path / name).mkdir()
    for path in ("in/a.safetensors", "secret/b.safetensors"):
        ai.save_safetensors(tmp_path / path, {"w": np.arange(6, dtype=np.float32)})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(what: str, path: str | Path) -> str:
    with pytest.raises(PermissionError) as caught:
        ai.open(path)
    assert caught.value.filename == os.fspath(path)
    assert f"--allow-{what}" in str(caught.value)
    assert f"permissions({what}=[PATH])" in str(caught.value)
    return str(caught.value)


def test_reading_takes_permission(folders: Path) -> None:
    with ai.permissions(read=["in"]):
        assert list(ai.open("in/a.safetensors")) == ["w"]
        assert list(ai.load_safetensors(folders / "in" / "a.safetensors")) == ["w"]
        refused("read", "secret/b.safetensors")
        refused("read", folders / "secret" / "b.safetensors")
    assert list(ai.open("secret/b.safetensors")) == ["w"]


def test_what_is_not_given_is_not_allowed(folders: Path) -> None:
    with ai.permissions():
        refused("read", "in/a.safetensors")
    with ai.permissions(write=True):
        refused("read", "in/a.safetensors")
    with ai.permissions(read=True), pytest.raises(PermissionError, match="--allow-write"):
        ai.save_safetensors("out/c.safetensors", {"w": np.zeros(2)})
    assert os.listdir("out") == []


@pytest.mark.parametrize(
    "path",
    ["in/../secret/b.safetensors", "./in/./../secret/b.safetensors", "in/link.safetensors", "in/folder/b.safetensors"],
)
def test_dots_and_links_do_not_lead_out(folders: Path, path: str) -> None:
    (folders / "in" / "link.safetensors").symlink_to(folders / "secret" / "b.safetensors")
    (folders / "in" / "folder").symlink_to(folders / "secret")
    with ai.permissions(read=["in"]):
        refused("read", path)
    assert list(ai.open(path)) == ["w"]


def test_a_folder_is_no_prefix_of_a_name(folders: Path) -> None:
    (folders / "in-other").mkdir()
    ai.save_safetensors("in-other/d.safetensors", {"w": np.zeros(2)})
    with ai.permissions(read=["in"]):
        refused("read", "in-other/d.safetensors")


def test_an_allowed_link_means_where_it_leads(folders: Path) -> None:
    (folders / "way").symlink_to(folders / "secret")
    with ai.permissions(read=["way"]):
        assert list(ai.open("secret/b.safetensors")) == ["w"]


def test_relative_paths_stand_for_the_folder_of_the_moment(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = ai.permissions(read=["in"])
    monkeypatch.chdir(folders / "secret")
    with allowed:
        refused("read", "b.safetensors")
        assert list(ai.open("../in/a.safetensors")) == ["w"]


def test_a_single_file(folders: Path) -> None:
    ai.save_safetensors("in/c.safetensors", {"w": np.zeros(2)})
    with ai.permissions(read="in/a.safetensors", write=Path("out/x.safetensors")):
        ai.convert("in/a.safetensors", "out/x.safetensors")
        refused("read", "in/c.safetensors")
        with pytest.raises(PermissionError):
            ai.convert("in/a.safetensors", "out/y.safetensors")
    assert os.listdir("out") == ["x.safetensors"]


def test_fs_is_for_both(folders: Path) -> None:
    with ai.permissions(fs=["in", "out"]):
        ai.convert("in/a.safetensors", "out/a.apsim")
        refused("read", "secret/b.safetensors")
        with pytest.raises(PermissionError):
            ai.save_model("secret/c.apsim", {"w": np.zeros(2)})
    with ai.permissions(fs=True):
        assert list(ai.open("secret/b.safetensors")) == ["w"]


@pytest.mark.parametrize("name", ["a.gguf", "a.safetensors", "a.apsim"])
@pytest.mark.parametrize("shard", [None, 64])
def test_saving_outside_leaves_nothing(folders: Path, name: str, shard: int | None) -> None:
    params = {"v": np.ones(32, np.float32), "w": np.ones(32, np.float32)}
    save = {"gguf": ai.save_gguf, "safetensors": ai.save_safetensors, "apsim": ai.save_model}[name.partition(".")[2]]
    more = {"architecture": "x"} if save is ai.save_gguf else {}
    with ai.permissions(write=["out"]):
        with pytest.raises(PermissionError):
            save(f"secret/{name}", params, shard=shard, **more)
        save(f"out/{name}", params, shard=shard, **more)
    assert os.listdir("secret") == ["b.safetensors"]
    assert len(os.listdir("out")) == 1 if shard is None else len(os.listdir("out")) >= 2


def test_saving_over_a_link_that_leads_out(folders: Path) -> None:
    before = Path("secret/b.safetensors").read_bytes()
    (folders / "out" / "x.safetensors").symlink_to(folders / "secret" / "b.safetensors")
    with ai.permissions(write=["out"]), pytest.raises(PermissionError):
        ai.save_safetensors("out/x.safetensors", {"w": np.zeros(2)})
    assert Path("secret/b.safetensors").read_bytes() == before


def test_shards_outside_the_folder(folders: Path) -> None:
    params = {"v": np.ones(32, np.float32), "w": np.ones(32, np.float32)}
    index = ai.save_safetensors("in/big.safetensors", params, shard=128)
    for name in os.listdir("in"):
        if "-00002-of-" in name:
            os.rename(f"in/{name}", f"secret/{name}")
            os.symlink(folders / "secret" / name, f"in/{name}")
    assert sorted(ai.open(index)) == ["v", "w"]
    with ai.permissions(read=["in"]), pytest.raises(PermissionError):
        np.asarray(ai.open(index)["w"])


def test_restrictions_nest_and_only_take_away(folders: Path) -> None:
    with ai.permissions(read=["in", "secret"]):
        with ai.permissions(read=["secret", "out"]):
            refused("read", "in/a.safetensors")
            assert list(ai.open("secret/b.safetensors")) == ["w"]
        assert list(ai.open("in/a.safetensors")) == ["w"]
    with ai.permissions(), ai.permissions(fs=True):
        refused("read", "in/a.safetensors")


def test_other_threads_are_restricted_too(folders: Path) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            ai.open("secret/b.safetensors")
        except PermissionError as exc:
            caught.append(exc)

    with ai.permissions(read=["in"]):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_leaving_out_of_order_and_errors(folders: Path) -> None:
    a, b = ai.permissions(read=["in"]), ai.permissions(read=["in"])
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    refused("read", "secret/b.safetensors")
    b.__exit__(None, None, None)
    with pytest.raises(ZeroDivisionError), ai.permissions():
        _ = 1 / 0
    assert list(ai.open("secret/b.safetensors")) == ["w"]


@pytest.mark.parametrize(
    ("allowed", "asked", "good"),
    [
        ("https://host/models", "https://host/models/a.gguf", True),
        ("https://host/models/", "https://host/models/b/a.gguf?download=1", True),
        ("https://host/models", "https://host/models-2/a.gguf", False),
        ("https://host/models", "https://host/models/../other/a.gguf", False),
        ("https://host/models", "https://host/models/%2e%2e/other/a.gguf", False),
        ("https://host/models", "https://host.evil/models/a.gguf", False),
        ("https://host/models", "https://host@evil/models/a.gguf", False),
        ("https://host/models", "http://host/models/a.gguf", False),
        ("https://host", "https://HOST/anything", True),
        ("s3://bucket/dir", "s3://bucket/dir/a.safetensors", True),
        ("s3://bucket/dir", "s3://bucket2/dir/a.safetensors", False),
        ("https://host/models", "https://host/models%3F/../../secret/a.gguf", False),
        ("https://host/models", "https://host/models%3Fx/a.gguf", False),
        ("https://host/models", "https://host/models%23/a.gguf", False),
        ("https://host/models", "https://host/secret/%252e%252e/models/a.gguf", False),
        ("https://host/models", "https://host/models/..;/secret/a.gguf", False),
        ("https://host/models", "https://host/models/..%5csecret/a.gguf", False),
        ("https://host/models", "https://user:pass@host:443/models/a.gguf", True),
        ("https://host:8000/models", "https://host/models/a.gguf", False),
        ("https://host/a%2520b", "https://host/a%2520b/c.gguf", True),
        ("http://[::1]:80/models", "http://[::1]/models/a.gguf", True),
        ("s3://bucket/dir", "s3://bucket/dir?x/a.safetensors", False),
        ("s3://bucket/dir", "s3://bucket/dir/a.safetensors?versionId=3", True),
        ("s3://bucket/dir", "s3://bucket/dir/a::file:///secret", False),
        ("hf://org/repo", "hf://org/repo/a.gguf", True),
        ("hf://org/repo", "hf://org/repo/../other/a.gguf", False),
        ("hf://org/repo", "https://huggingface.co/org/repo/resolve/main/a.gguf", False),
        ("in", "file:///in/a.gguf", False),
        ("in", "https://host/in/a.gguf", False),
        ("/", "https://host/in/a.gguf", False),
    ],
)
def test_urls(folders: Path, allowed: str, asked: str, good: bool) -> None:
    with ai.permissions(read=[allowed]):
        if good:
            check_read(asked)
        else:
            with pytest.raises(PermissionError):
                check_read(asked)


def test_what_is_asked_for_counts_and_not_how_it_is_shown(folders: Path) -> None:
    """A name that is decoded for people and read as a URL again would be another one."""
    for stream in (False, True):
        with ai.permissions(read=["http://127.0.0.1:9/in"]), pytest.raises(PermissionError) as caught:
            ai.open("http://127.0.0.1:9/in%3F/../../secret/b.safetensors?token=hunter2", stream=stream)
        assert "hunter2" not in str(caught.value)


def test_file_urls_are_paths(folders: Path) -> None:
    for scheme in ("file", "FILE", "local"):
        good, bad = (f"{scheme}://{folders}/{name}" for name in ("in/a.safetensors", "in/%2e%2e/secret/b.safetensors"))
        with ai.permissions(read=["in"]):
            assert list(ai.open(good)) == ["w"]
            with pytest.raises(PermissionError):
                ai.open(bad)
        with ai.permissions(read=[f"{scheme}://{folders}/in"]):
            assert list(ai.open("in/a.safetensors")) == ["w"]


def test_a_path_that_looks_like_a_url_is_a_path(folders: Path) -> None:
    Path("https:/host").mkdir(parents=True)
    Path("https:/host/m").symlink_to(folders / "secret")
    with ai.permissions(fs=["https://host/m"]):
        with pytest.raises(PermissionError):
            ai.open("file://https%3A//host/m/b.safetensors")
        with pytest.raises(PermissionError):
            ai.save_safetensors("https://host/m/c.safetensors", {"w": np.zeros(2)})


def test_a_folder_outside_is_not_listed(folders: Path) -> None:
    ai.save_safetensors("secret/named-so.safetensors", {"w": np.zeros(2)})
    with ai.permissions(read=["in"]):
        assert list(ai.open("in")) == ["w"]
        assert "named-so" not in refused("read", "secret")


def test_key_files_are_files(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from apsi_inspect.cli import main
    from apsi_inspect.integrity.signing import key_of_file

    Path("secret/key").write_bytes(b"k" * 32)
    ai.save_model("in/x.apsim", {"w": np.zeros(2)}, sign=b"k" * 32)
    assert key_of_file("secret/key") == b"k" * 32
    assert main(["model", "verify", "in/x.apsim", "--key-file", "secret/key"]) == 0
    with ai.permissions(read=["in"]):
        with pytest.raises(PermissionError):
            key_of_file("secret/key")
        assert main(["model", "verify", "in/x.apsim", "--key-file", "secret/key"]) == 2
    assert "not allowed" in capsys.readouterr().err


def test_samples_make_no_folder_outside(folders: Path) -> None:
    with ai.permissions(write=["out"]):
        assert ai.samples.write("out/new")
        with pytest.raises(PermissionError):
            ai.samples.write("secret/new")
    assert not Path("secret/new").exists()


@pytest.mark.parametrize(
    "bad", ["https://u:hunter2@host/a/../b?token=hunter2", "https://host:port/a", "s3://b/a::file:///x"]
)
def test_urls_that_are_ambiguous_allow_nothing(bad: str) -> None:
    with pytest.raises(ValueRefusedError, match="read=") as caught:
        ai.permissions(read=[bad])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("bad", [[""], [3], [None], ["a", ""], [b"x"]])
def test_what_is_no_path(bad: list[object]) -> None:
    with pytest.raises(ValueRefusedError, match="read="):
        ai.permissions(read=bad)  # type: ignore[arg-type]


def test_the_user_key_is_a_file_too(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APSI_KEY_FILE", str(folders / "secret" / "key"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folders / "secret"))
    monkeypatch.setenv("HOME", str(folders / "secret"))
    with ai.permissions(write=["out"]), pytest.raises(PermissionError):
        ai.save_model("out/x.apsim", {"w": np.zeros(2)}, sign=True)
    assert os.listdir("out") == []


def test_samples_are_saved_like_everything(folders: Path) -> None:
    with ai.permissions(write=["out"]):
        ai.samples.write("out")
        with pytest.raises(PermissionError):
            ai.samples.write("secret")
    assert os.listdir("secret") == ["b.safetensors"]


def test_removing_takes_permission(folders: Path) -> None:
    from apsi_inspect.atomic import remove

    with ai.permissions(write=["out"]):
        assert remove([str(folders / "secret" / "nothing")]) == 0
        with pytest.raises(PermissionError):
            remove([str(folders / "secret" / "b.safetensors")])
    assert Path("secret/b.safetensors").exists()


def test_files_are_announced(folders: Path) -> None:
    program = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append((event, *args)) if event.startswith("apsi.") else None)
import apsi_inspect as ai
ai.convert("in/a.safetensors", "out/b.gguf", architecture="x")
assert ("apsi.open", "in/a.safetensors") in seen, seen
assert ("apsi.save", "out/b.gguf") in seen, seen
with ai.permissions():
    try:
        ai.open("secret/b.safetensors")
    except PermissionError:
        pass
assert seen[-1] == ("apsi.open", "secret/b.safetensors"), seen
"""
    subprocess.run([sys.executable, "-c", program], cwd=folders, check=True)


def test_a_message_hides_what_a_name_hides(folders: Path) -> None:
    with ai.permissions():
        with pytest.raises(PermissionError) as caught:
            check_write("a\x1b[31m.gguf")
        assert caught.value.filename == "a\x1b[31m.gguf"
    assert "\x1b" not in repr(ai.permissions(read=["a\x1b[31m"]))
