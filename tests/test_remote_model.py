"""Models behind URLs: every verb gives what it gives for the same files on disk, and reads no more than it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect import remote_ranges
from apsi_inspect.errors import ModelFileError, VerificationError
from apsi_inspect.integrity.digests import CHUNK

from .handmade import Gguf
from .servers import File, Server

GOLDEN = Path(__file__).parent / "data" / "golden"
SAMPLES = [*(p.name for p in sorted(GOLDEN.glob("*.apsim"))), *ai.samples.names()]


@pytest.fixture(autouse=True)
def _direct_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote_ranges, "PAUSE", 0.01)


def serving(folder: Path, fault: str = "") -> Server:
    """A server of the files of a folder."""
    return Server(
        {f"/{p.relative_to(folder).as_posix()}": p.read_bytes() for p in folder.rglob("*") if p.is_file()}, fault
    )


def same_models(there: ai.ModelFile, here: ai.ModelFile) -> None:
    assert list(there) == list(here)
    assert there.format == here.format
    assert [f.code for f in there.findings] == [f.code for f in here.findings]
    assert there.file_size == here.file_size
    for name in here:
        assert there[name].info[:8] == here[name].info[:8]
        assert bytes(there[name].raw()) == bytes(here[name].raw())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of samples."""
    folder = tmp_path_factory.mktemp("samples")
    ai.samples.write(folder)
    return folder


@pytest.mark.parametrize("name", SAMPLES)
def test_every_verb_gives_what_it_gives_for_a_file(name: str, written: Path, tmp_path: Path) -> None:
    path = GOLDEN / name if (GOLDEN / name).exists() else written / name
    with Server({f"/{path.name}": path.read_bytes()}) as server:
        url = f"{server.url}/{path.name}"
        with ai.open(url) as there, ai.open(path) as here:
            same_models(there, here)
            assert {**ai.model_info(there), "file": ""} == {**ai.model_info(here), "file": ""}
            assert there.verify().status == here.verify().status
        a, b = ai.verify(url), ai.verify(path)
        assert {**a.to_dict(), "file": ""} == {**b.to_dict(), "file": ""}
        assert ai.scan(url).verdict == ai.scan(path).verdict
        x, y = ai.stats(url).frame, ai.stats(path).frame
        assert x.drop(columns="file", errors="ignore").equals(y.drop(columns="file", errors="ignore"))
        if path.suffix != ".gguf":
            ai.convert(url, tmp_path / "a.gguf", architecture="llama")
            ai.convert(path, tmp_path / "b.gguf", architecture="llama")
            assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for v in node.values():
            yield from leaves(v)
    elif isinstance(node, list | tuple):
        for v in node:
            yield from leaves(v)
    else:
        yield node


def same_trees(a: Any, b: Any) -> None:
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert type(x) is type(y)
        if isinstance(x, ai.QTensor):
            x, y = x.dequantize(), y.dequantize()
        np.testing.assert_array_equal(np.asarray(getattr(x, "magnitude", x)), np.asarray(getattr(y, "magnitude", y)))


@pytest.mark.parametrize("verify", [True, False, "lazy"])
@pytest.mark.parametrize("name", ["qtensors.apsim", "list_root_tied.apsim", "base_profile.apsim", "units.apsim"])
def test_load_model(name: str, verify: bool | str) -> None:
    with serving(GOLDEN) as server:
        same_trees(ai.load_model(f"{server.url}/{name}", verify=verify), ai.load_model(GOLDEN / name))
    with serving(GOLDEN) as server:
        name = "sharded/model.apsim.index.json"
        same_trees(ai.load_model(f"{server.url}/{name}", verify=verify), ai.load_model(GOLDEN / name))


def test_load_gguf_and_safetensors(written: Path) -> None:
    for path in sorted(written.iterdir()):
        load = {".gguf": ai.load_gguf, ".safetensors": ai.load_safetensors}.get(path.suffix)
        if load is not None:
            with Server({f"/{path.name}": path.read_bytes()}) as server:
                same_trees(load(f"{server.url}/{path.name}"), load(path))


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .apsim of six chunks: four tensors of 10 MiB, and a few bytes."""
    path = tmp_path_factory.mktemp("chunked") / "m.apsim"
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.standard_normal((2560, 1024), np.float32) for i in range(4)}
    ai.save_model(path, {**tensors, "z": np.arange(5.0)})
    return path


def test_lazy_verification_fetches_the_chunks_that_are_touched(chunked: Path) -> None:
    here = ai.load_model(chunked)
    with serving(chunked.parent) as server:
        tree = ai.load_model(f"{server.url}/m.apsim", verify="lazy")
        assert server.sent < 1 << 20
        before = server.sent
        np.testing.assert_array_equal(tree.t1, here.t1)
        first = server.sent - before
        assert 10 << 20 <= first <= 3 * CHUNK  # two or three chunks of 8 MiB
        np.testing.assert_array_equal(tree.t2, here.t2)
        assert server.sent - before - first <= 2 * CHUNK  # the chunk that both share was kept
        server.files["/m.apsim"].data = flipped(server.files["/m.apsim"].data, 3 << 20)
        with pytest.raises(VerificationError, match="chunk 0"):
            _ = tree.t0
        np.testing.assert_array_equal(tree.t3, here.t3)


def flipped(data: bytes, at: int) -> bytes:
    out = bytearray(data)
    out[at] ^= 1
    return bytes(out)


def test_ctrl_c_ends_a_slow_verification(chunked: Path) -> None:
    with serving(chunked.parent, "slow") as server:
        server.settings["pause"] = 0.2  # 128 KiB at a time on each of eight connections
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ai.verify(f"{server.url}/m.apsim")
        assert time.monotonic() - begin < 8  # of more than twelve


def test_verify_goes_through_the_chunks_once(chunked: Path) -> None:
    size = chunked.stat().st_size
    with serving(chunked.parent) as server:
        url = f"{server.url}/m.apsim"
        report = ai.verify(url)
        assert (report.status, report.path) == ("intact", url)
        assert server.sent <= size + (1 << 20)
        server.files["/m.apsim"] = File(flipped(chunked.read_bytes(), size // 2))
        report = ai.verify(url)
        assert report.status == "damaged"
        assert len(report.damage) == 1
        server.sent = 0
        with pytest.raises(VerificationError):
            ai.load_model(url)
        assert server.sent <= size + (1 << 20)


@pytest.mark.parametrize("fault", ["", "drops", "no_ranges"])
def test_shards_beside_their_index(fault: str) -> None:
    with serving(GOLDEN / "sharded", fault) as server:
        url = f"{server.url}/model.apsim.index.json?token=t"
        with ai.open(url, stream=fault == "no_ranges") as there, ai.open(GOLDEN / "sharded") as here:
            same_models(there, here)
            assert there.verify().status == here.verify().status == "intact"
        assert {p.partition("?")[2] for p, _ in server.requests} == {"token=t"}
        name = next(p for p in server.files if "00002" in p)
        del server.files[name]
        if not fault:
            with pytest.raises(ModelFileError, match="is missing"):
                ai.open(url)
            assert ai.verify(url).status == "incomplete"
            assert ai.scan(url).verdict == "unknown"


@pytest.mark.parametrize(
    "shard", ["../m.safetensors", "/etc/passwd", "http://127.0.0.1/x", "a/b.safetensors", "x\\y", "..", "a:b", ""]
)
def test_shards_elsewhere_are_refused(shard: str) -> None:
    index = json.dumps({"metadata": {}, "weight_map": {"a": shard}}).encode()
    with Server({"/m/model.safetensors.index.json": index, "/m.safetensors": b""}) as server:
        with pytest.raises(ModelFileError, match="only a plain name in the same folder"):
            ai.open(f"{server.url}/m/model.safetensors.index.json")
        assert len(server.requests) == 1


def test_a_name_with_a_query_stays_a_name() -> None:
    index = json.dumps({"metadata": {}, "weight_map": {"a": "m.safetensors?x=1"}}).encode()
    with Server({"/model.safetensors.index.json": index}) as server:
        with pytest.raises(ModelFileError, match="is missing"):
            ai.open(f"{server.url}/model.safetensors.index.json")
        assert server.requests[-1][0] == "/m.safetensors%3Fx%3D1"


def split_gguf(number: int, count: int) -> bytes:
    pairs = [("general.architecture", "STRING", "x"), ("split.no", "UINT16", number), ("split.count", "UINT16", count)]
    return Gguf().file([*pairs, ("split.tensors.count", "INT32", count)], [(f"t{number}", [4], 0, bytes(16))])


def test_parts_of_a_split_gguf() -> None:
    files = {f"/m-{i + 1:05d}-of-00003.gguf": split_gguf(i, 3) for i in range(3)}
    with Server(files) as server:
        with ai.open(f"{server.url}/m-00002-of-00003.gguf") as model:
            assert list(model) == ["t0", "t1", "t2"]
            assert [f.rpartition("/")[2] for f in model.files] == [f[1:] for f in files]
        del server.files["/m-00003-of-00003.gguf"]
        with ai.open(f"{server.url}/m-00001-of-00003.gguf") as model:
            assert [f.code for f in model.findings] == ["incomplete"]


def test_external_data_of_onnx(tmp_path: Path) -> None:
    from .test_onnx_external import DATA, external

    path = external(tmp_path / "m", "sub/w.bin", offset="16")
    (tmp_path / "m" / "sub").mkdir()
    (tmp_path / "m" / "sub" / "w.bin").write_bytes(DATA.tobytes())
    with serving(tmp_path) as server:
        with ai.open(f"{server.url}/m/{path.name}") as model:
            np.testing.assert_array_equal(model["w"].numpy(), DATA[4:8])
        assert [p for p, _ in server.requests] == ["/m/m.onnx", "/m/sub/w.bin"]
        external(tmp_path / "m", "../w.bin")
        server.files["/m/m.onnx"] = File((tmp_path / "m" / "m.onnx").read_bytes())
        with pytest.raises(ModelFileError, match="outside of the model's folder"):
            ai.open(f"{server.url}/m/m.onnx")


def test_parts_of_tensors_are_fetched_alone() -> None:
    from gguf import GGMLQuantizationType, quants

    x = np.random.default_rng(0).standard_normal((4096, 1024)).astype(np.float32)
    blob = Gguf().file(
        [("general.architecture", "STRING", "x")],
        [
            ("q", [4096, 1024], 8, quants.quantize(x, GGMLQuantizationType.Q8_0).tobytes()),
            ("f", [4096, 1024], 0, x.tobytes()),
        ],
    )
    with Server({"/m.gguf": blob}) as server, ai.open(f"{server.url}/m.gguf") as model:
        for name in ("q", "f"):
            whole = np.frombuffer(model[name].raw(), np.uint8)
            assert whole.size == model[name].nbytes
            values = model[name].numpy()
            row = model[name].nbytes // 4096
            for key in (3000, slice(1000, 1010), (slice(3990, 3980, -2), 5), (-1, slice(100, 200)), (..., 4000, 7)):
                if isinstance(key, tuple) and key[0] is Ellipsis:
                    key = (4000, 7)
                model.sources[0].settle()  # type: ignore[attr-defined]
                before = server.sent
                np.testing.assert_array_equal(model[name][key], values[key])
                assert server.sent - before <= 20 * row + (2 << 16)


def test_statistics_stay_in_bounded_memory() -> None:
    """A tensor of 400 MB is streamed: the process stays far below it."""
    head = json.dumps({"a": {"dtype": "F32", "shape": [100_000, 1000], "data_offsets": [0, 400_000_000]}}).encode()
    head += b" " * (-len(head) % 8)
    file = File(len(head).to_bytes(8, "little") + head, 8 + len(head) + 400_000_000)
    with Server({"/m.safetensors": file}) as server:
        code = f"""
import resource, apsi_inspect as ai
with ai.open({server.url + "/m.safetensors"!r}) as model:
    t = model["a"]
    list(t[:10])
    ai.stats({ai.samples.path("fracast.safetensors")!r})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert t.stats().zeros == 100_000_000
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 150_000  # KiB
        assert 400_000_000 <= server.sent < 402_000_000


def test_executors_read_the_url_themselves(written: Path, chunked: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path = written / "tiny-llama.gguf"
    files = {"/m.gguf": path.read_bytes(), "/m.apsim": chunked.read_bytes()}
    with Server(files, "needs_token", authorization="Bearer t") as server, ThreadPoolExecutor(2) as pool:
        options = {"token": "t"}
        with ai.open(f"{server.url}/m.gguf?sig=SECRET", storage_options=options) as model:
            columns = ["mean", "std", "zeros"]
            assert ai.stats(model, executor=pool).frame[columns].equals(ai.stats(path).frame[columns])
        assert ai.verify(f"{server.url}/m.apsim", executor=pool, storage_options=options).status == "intact"
        with (
            ai.open(f"{server.url}/m.gguf", storage_options=options, stream=True) as model,
            pytest.raises(ai.ValueRefusedError, match="in memory"),
        ):
            ai.stats(model, executor=pool)


# -- command line and magic ----------------------------------------------------------------------------------------


def test_the_command_line_takes_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from apsi_inspect.cli import main

    def apsi(*args: object) -> tuple[int, str, str]:
        code = main(["model", *map(str, args)])
        return code, *capsys.readouterr()

    with serving(GOLDEN) as server:
        shown, url = f"{server.url}/units.apsim", f"{server.url}/units.apsim?sig=SECRET"
        for verb in ("info", "verify", "scan", "stats"):
            code, out, err = apsi(verb, url, "--json")
            assert (code, err) == (0, ""), verb
            assert json.loads(out)["file"] == shown
            assert "SECRET" not in "".join(map(str, apsi(verb, url)))
            code, out, err = apsi(verb, f"{server.url}/none.apsim?sig=SECRET")
            assert (code, out) == (3, "")
            assert "HTTP 404" in err
            assert "SECRET" not in err
        code, out, err = apsi("convert", url, tmp_path / "out.safetensors")
        assert code == 0, err
        assert "SECRET" not in out + err
        assert apsi("info", f"{server.url}/")[0] == 2


def test_the_magic_takes_urls() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.run_line_magic("load_ext", "apsi_inspect")
        with serving(GOLDEN) as server:
            done = shell.run_cell(f"%apsi_info {server.url}/units.apsim?sig=SECRET")
            done.raise_error()
            assert done.result.path == f"{server.url}/units.apsim"
    finally:
        InteractiveShell.clear_instance()


def test_an_onnx_model_behind_a_url_is_not_run(written: Path) -> None:
    with serving(written) as server:
        model = ai.onnx_model(f"{server.url}/tiny-network.onnx")
        assert set(model.params) >= {"second.weight"}
        with pytest.raises(ModelFileError, match="a file on disk is needed"):
            model(np.zeros((1, 8), np.float32))
