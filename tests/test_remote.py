"""Files behind http: ranges, what is read of a large file, faults of servers, secrets; real servers on loopback."""

from __future__ import annotations

import errno
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import apsi_inspect as ai
from apsi_inspect import remote, remote_ranges
from apsi_inspect.errors import (
    MissingPackageError,
    ModelFileError,
    TruncatedFileError,
    UnsupportedFileError,
    ValueRefusedError,
)
from apsi_inspect.remote import BLOCK, RemoteSource, masked, open_source
from apsi_inspect.remote_download import DownloadedSource

from . import handmade
from .handmade import Gguf
from .servers import File, Server

DATA = random.Random(5).randbytes(3_000_000)


@pytest.fixture(autouse=True)
def _direct_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote_ranges, "PAUSE", 0.01)


def source_of(server: Server, path: str = "/f", **options: object) -> RemoteSource:
    return RemoteSource(server.url + path, options)


# -- ranges --------------------------------------------------------------------------------------------------------


def test_every_range_is_the_files() -> None:
    rng = random.Random(1)
    with Server({"/f": DATA}) as server, source_of(server) as source:
        assert (source.name, source.size, source.url) == (f"{server.url}/f", len(DATA), f"{server.url}/f")
        for _ in range(200):
            a, z = sorted(rng.randint(0, len(DATA)) for _ in range(2))
            z = min(z, a + rng.choice([1, 100, BLOCK, BLOCK + 1, 10 * BLOCK]))
            assert source.read_at(a, z - a) == DATA[a:z]
            view = source.view(a, z - a)
            assert view == DATA[a:z]
            assert view.readonly
            out = bytearray(z - a)
            source.read_into(a, memoryview(out))
            assert out == DATA[a:z]
        assert server.sent <= len(DATA) + BLOCK  # nothing came twice
        for offset, nbytes in ((0, len(DATA) + 1), (len(DATA), 1), (-1, 1), (0, -1), (2**63, 1)):
            with pytest.raises(TruncatedFileError):
                source.view(offset, nbytes)


def test_long_ranges_come_in_parts_and_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "EXACT", 100_000)
    monkeypatch.setattr(remote, "PART", 300_000)
    with Server({"/f": DATA}) as server, source_of(server) as source:
        before = server.sent
        assert source.view(7, 2_000_000) == DATA[7:2_000_007]
        assert server.sent - before == 2_000_000
        assert len(server.requests) == 1 + 7
        out = bytearray(2_000_000)
        source.read_into(9, memoryview(out))
        assert out == DATA[9:2_000_009]


def test_memory_of_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CACHE", 10 * BLOCK)
    with Server({"/f": DATA}) as server, source_of(server) as source:
        source.settle()
        for a in [*range(0, len(DATA) - BLOCK, BLOCK), 5, 2_000_000]:
            assert source.read_at(a, BLOCK) == DATA[a : a + BLOCK]
        assert sum(run.count for run in source._runs.values()) <= 10
        assert sum(len(run.data.result() or b"") for run in source._runs.values()) <= 10 * BLOCK


def test_threads_wait_for_what_one_of_them_fetches() -> None:
    with Server({"/f": DATA}, "slow") as server, source_of(server) as source, ThreadPoolExecutor(8) as pool:
        source.settle()
        ranges = [(a, 300_000) for a in range(600_000, 2_600_000, 50_000)]
        for (a, n), got in zip(ranges, pool.map(lambda r: source.read_at(*r), ranges), strict=True):
            assert got == DATA[a : a + n]
        assert server.sent <= len(DATA)


@pytest.mark.parametrize("size", [0, 1, 100, BLOCK, remote_ranges.HEAD - 1, remote_ranges.HEAD, remote_ranges.HEAD + 1])
@pytest.mark.parametrize("fault", ["", "no_ranges"])
def test_small_files(size: int, fault: str) -> None:
    with Server({"/f": DATA[:size]}, fault) as server:
        if fault and size > remote_ranges.HEAD:
            with pytest.raises(UnsupportedFileError, match="does not support range requests"):
                source_of(server)
            return
        with source_of(server) as source:
            assert source.size == size
            assert source.read_at(0, size) == DATA[:size]
        assert len(server.requests) == (1 if size <= remote_ranges.HEAD else 2)


def test_the_whole_file_in_memory() -> None:
    with Server({"/f": DATA}) as server, source_of(server) as source:
        source.hold()
        before = len(server.requests)
        assert source.view(10, 2_900_000) == DATA[10:2_900_010]
        assert source.read_at(0, 5) == DATA[:5]
        assert len(server.requests) == before


def test_closed() -> None:
    with Server({"/f": DATA}) as server:
        source = source_of(server)
        view = source.view(0, 10)
        source.close()
        assert view == DATA[:10]
        with pytest.raises(ModelFileError, match="is closed"):
            source.read_at(0, 1)


# -- what is read of a large file ----------------------------------------------------------------------------------

GIGABYTE = 10**9


def big_safetensors(tensors: int) -> File:
    shape = [GIGABYTE // tensors // 2 // 64, 64]
    width = 2 * shape[0] * 64
    entries = {
        f"model.layers.{i}.mlp.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [i * width, (i + 1) * width]}
        for i in range(tensors)
    }
    import json

    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return File(head, len(head) + tensors * width)


def big_gguf(tokens: int) -> File:
    vocabulary = [f"token number {i}" for i in range(tokens)]
    pairs = [
        ("general.architecture", "STRING", "llama"),
        ("tokenizer.ggml.tokens", "ARRAY", ("STRING", vocabulary)),
        ("tokenizer.ggml.scores", "ARRAY", ("FLOAT32", [0.0] * tokens)),
        ("tokenizer.ggml.token_type", "ARRAY", ("INT32", [1] * tokens)),
    ]
    width = GIGABYTE // 210 * 210
    head = Gguf().file(pairs, [("output.weight", [256 * (width // 210)], 14, b"")])
    return File(head, len(head) + width)


@pytest.mark.parametrize(("tensors", "requests"), [(1, 1), (300, 1), (20_000, 2)])
def test_a_gigabyte_of_safetensors_is_inspected_by_its_header(tensors: int, requests: int) -> None:
    file = big_safetensors(tensors)
    with Server({"/m/model.safetensors": file}) as server, ai.open(f"{server.url}/m/model.safetensors") as model:
        assert len(model) == tensors
        assert model.file_size == file.size
        repr(model)
        ai.model_info(model)
        assert len(server.requests) == requests
        assert server.sent < file.size // 100
        before, name = server.sent, f"model.layers.{tensors - 1}.mlp.weight"
        if tensors == 300:
            assert model[name].numpy().shape == model[name].shape
            assert model[name].nbytes <= server.sent - before <= model[name].nbytes + 2 * BLOCK
            before = server.sent
        assert model[name][5:7].shape == (2, 64)  # a slice of a tensor reads its rows
        assert server.sent - before <= 2 * BLOCK


@pytest.mark.parametrize("tokens", [1000, 32_000, 128_000])
def test_a_gguf_with_a_vocabulary_takes_three_requests(tokens: int) -> None:
    file = big_gguf(tokens)
    with Server({"/m.gguf": file}) as server, ai.open(f"{server.url}/m.gguf") as model:
        assert model["output.weight"].encoding == "Q6_K"
        assert model.metadata["tokenizer.ggml.tokens"][tokens - 1] == f"token number {tokens - 1}"
        assert len(server.requests) <= 3
        assert server.sent < file.size // 100


def test_tensors_of_a_small_file_are_the_files(tmp_path: Path) -> None:
    blob = handmade.safetensors([("a", "F32", [3, 5], DATA[:60]), ("b", "BF16", [4], DATA[60:68])], {"k": "v"})
    (tmp_path / "m.safetensors").write_bytes(blob)
    with Server({"/m.safetensors": blob}) as server:
        there, here = ai.open(f"{server.url}/m.safetensors"), ai.open(tmp_path / "m.safetensors")
        assert list(there) == list(here)
        assert dict(there.metadata) == dict(here.metadata)
        assert there.findings == here.findings
        for name in here:
            assert bytes(there[name].raw()) == bytes(here[name].raw())
            assert there[name].numpy().tobytes() == here[name].numpy().tobytes()


# -- servers with faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["slow", "drops", "hangs_up", "busy"])
def test_faults_that_pass(fault: str) -> None:
    with Server({"/f": DATA}, fault) as server, source_of(server) as source:
        assert source.view(1, len(DATA) - 2) == DATA[1:-1]
        assert server.sent < 1.5 * len(DATA)  # continued where it broke off


def test_a_server_that_goes_silent_is_asked_again() -> None:
    with Server({"/f": DATA}, "silent", silence=6.0) as server:
        source = RemoteSource(f"{server.url}/f", {"timeout": 2.0})
        assert source.read_at(0, 500_000) == DATA[:500_000]
        assert [r for _, r in server.requests] == ["bytes=0-524287", "bytes=262144-524287"]


def test_what_never_passes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server({"/f": DATA}, "always_drops") as server:
        with pytest.raises(OSError, match=r"closed the connection.*tried 3 times") as info:
            RemoteSource(f"{server.url}/f", {"retries": 2})
        assert info.value.errno == errno.ECONNABORTED
        assert len(server.requests) == 3
    with pytest.raises(OSError, match="refused"):
        RemoteSource(f"{server.url}/f", {"retries": 1})


def test_servers_without_ranges_are_refused_before_the_body() -> None:
    for fault in ("no_ranges", "endless"):
        with Server({"/f": File(b"", 10**12)}, fault) as server:
            with pytest.raises(UnsupportedFileError, match=r"stream=True"):
                source_of(server)
            assert len(server.requests) == 1
            assert server.sent < 50 << 20  # what the sockets hold


@pytest.mark.parametrize(
    "said",
    [
        "bytes 1-524288/3000000", "bytes 0-524288/3000000", "bytes 0-524287/*", "bytes 0-524287/100", "bytes 5-1/9",
        "bytes 0-100/3000000", "items 0-1/2", "bytes */3000000", "", "bytes 0-524287/" + "9" * 40,
    ],
)  # fmt: skip
def test_ranges_that_were_not_asked_for(said: str) -> None:
    with (
        Server({"/f": DATA}, "lies", content_range=said) as server,
        pytest.raises(ModelFileError, match=r"range|asked"),
    ):
        source_of(server)


@pytest.mark.parametrize("fault", ["changes", "grows"])
def test_a_file_that_changes_is_an_error(fault: str) -> None:
    with Server({"/f": DATA}, fault) as server, source_of(server) as source:
        assert source.read_at(0, 10) == DATA[:10]
        with pytest.raises(ModelFileError, match="has changed since it was opened"):
            source.read_at(2_000_000, 10)


def test_a_server_that_stops_giving_ranges_is_an_error() -> None:
    with Server({"/f": DATA}) as server, source_of(server) as source:
        server.fault = "no_ranges"
        with pytest.raises(ModelFileError, match="has changed"):
            source.read_at(2_000_000, 10)
        assert server.heads[1]["if-range"] == '"one"'


def test_a_compressed_answer_is_refused() -> None:
    with Server({"/f": DATA}, "zipped") as server:
        with pytest.raises(UnsupportedFileError):
            source_of(server)
        assert server.heads[0]["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, FileNotFoundError),
        (410, FileNotFoundError),
        (403, PermissionError),
        (401, PermissionError),
        (418, OSError),
    ],
)
def test_statuses_that_do_not_pass(status: int, kind: type[OSError]) -> None:
    with Server({"/f": DATA}, "status", status=status) as server:
        with pytest.raises(kind, match=f"HTTP {status}") as info:
            source_of(server)
        assert info.value.filename == f"{server.url}/f"
        assert len(server.requests) == 1


def test_ctrl_c_ends_a_slow_read_at_once() -> None:
    with Server({"/f": File(b"", 10**9)}, "slow") as server, source_of(server) as source:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            source.view(0, 500_000_000)  # in parts, on several connections: minutes
        assert time.monotonic() - begin < 10
        assert source.read_at(600_000, 10) == bytes(10)  # and can be read again


# -- redirects and secrets -----------------------------------------------------------------------------------------


def test_a_redirect_is_followed_once_and_remembered() -> None:
    with Server({"/f": DATA}) as last, Server({"/f": b""}, "redirects", location=f"{last.url}/f?signature=s") as first:
        source = RemoteSource(f"{first.url}/f", {"token": "secret", "headers": {"X-Key": "also"}})
        assert source.read_at(0, 2_900_000) == DATA[:2_900_000]
        assert len(first.requests) == 1
        assert first.heads[0]["authorization"] == "Bearer secret"
        assert not any({"authorization", "x-key"} & head.keys() for head in last.heads)
        last.fault, last.requests = "expires", []
        last.requests.append(("", None))  # the next answer is 403
        assert source.read_at(2_950_000, 50_000) == DATA[2_950_000:]
        assert len(first.requests) == 2


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/f", "gopher://x", "//", "http://[bad"])
def test_redirects_that_are_not_followed(location: str) -> None:
    with (
        Server({"/f": DATA}, "redirects", location=location) as server,
        pytest.raises(ModelFileError, match="redirects"),
    ):
        source_of(server)


@pytest.mark.parametrize("host", ["a%20b", "a" * 300, "...", "ex ample", "\0"])
def test_hosts_that_cannot_be(host: str) -> None:
    with pytest.raises(OSError, match=r"host|InvalidURL|gaierror"):
        RemoteSource(f"http://{host}/f", {"retries": 0})


def test_a_redirect_to_a_host_that_cannot_be() -> None:
    for location in (f"http://{'a' * 300}/f", "http://a b/f"):
        with (
            Server({"/f": DATA}, "redirects", location=location) as server,
            pytest.raises(OSError, match=r"host|gaierror"),
        ):
            source_of(server, retries=0)


@pytest.mark.parametrize("name", ["a b", "\xfcber", "\u20ac"])
def test_a_redirect_that_is_not_encoded(name: str) -> None:
    from urllib.parse import quote

    sent = name.encode().decode("latin-1")  # what a server that sends UTF-8 puts there, as the standard library sees it
    with (
        Server({f"/{name}": DATA, f"/{quote(name)}": DATA}) as last,
        Server({"/f": b""}, "redirects", location=f"{last.url}/{sent}") as first,
    ):
        assert source_of(first).read_at(5, 10) == DATA[5:15]


@pytest.mark.parametrize(
    "options",
    [
        {"headers": "hunter2"}, {"headers": None}, {"headers": {"A: b\r\n": "hunter2"}}, {"headers": {"A b": "c"}},
        {"headers": {"\xfc": "1"}}, {"headers": {1: "a"}}, {"headers": {"A": "hunter2\u20ac"}}, {"timeout": 0},
        {"token": "hunter2\u20ac"},
    ],
)  # fmt: skip
def test_options_that_cannot_be_sent(options: dict[str, object]) -> None:
    with pytest.raises(ValueRefusedError, match="storage_options for http") as caught:
        RemoteSource("http://127.0.0.1:9/f", options)
    assert "hunter2" not in str(caught.value)


def test_redirects_do_not_go_on_forever() -> None:
    with Server({"/f": DATA}, "redirects", location="/f") as server:
        with pytest.raises(ModelFileError, match="redirects more than"):
            source_of(server)
        assert len(server.requests) < 10


def test_a_redirect_from_https_to_http_is_refused() -> None:
    from apsi_inspect.remote_http import Client, HttpOptions
    from apsi_inspect.remote_url import locate

    client = Client(locate("https://host/f"), HttpOptions())
    with pytest.raises(ModelFileError, match="from https to 'http://host/f'"):
        client._redirected("https://host/f", "http://host/f?token=abc")
    assert client._redirected("https://host/a/f", "../g") == "https://host/g"


SECRET = "Tr0ub4dor"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/m.gguf", "https://host/a/m.gguf"),
        (f"https://user:{SECRET}@host:8/m.gguf", "https://host:8/m.gguf"),
        (f"https://host/m%20x.gguf?X-Amz-Signature={SECRET}&a=b#c", "https://host/m x.gguf"),
        (f"s3://bucket/key/m.gguf?versionId={SECRET}", "s3://bucket/key/m.gguf"),
        (f"ftp://u:{SECRET}@host/m.gguf", "ftp://host/m.gguf"),
        (f"simplecache::https://u:{SECRET}@host/m?t={SECRET}", "simplecache::https://host/m"),
        ("/a/path?x", "/a/path?x"),
    ],
)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_secrets_go_to_the_server_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    blob = handmade.safetensors([("a", "F32", [1], bytes(4))], {})
    with Server({"/m.safetensors": blob}) as server:
        url = f"{server.url.replace('//', f'//user:{SECRET}@')}/m.safetensors?X-Amz-Signature={SECRET}"
        with ai.open(url) as model:
            assert model.path == f"{server.url}/m.safetensors"
            for text in (repr(model), str(model), repr(model.sources), model._repr_html_(), str(ai.model_info(model))):
                assert SECRET not in text
            assert not model.findings
        assert server.requests[0][0] == f"/m.safetensors?X-Amz-Signature={SECRET}"
        assert server.heads[0]["authorization"].startswith("Basic ")
        for fault in ("status", "lies", "no_ranges", "always_drops", "redirects"):
            server.fault, server.files["/m.safetensors"] = fault, File(DATA)
            server.settings = {"status": 403, "content_range": "x", "location": f"ftp://u:{SECRET}@h/?x={SECRET}"}
            with pytest.raises((OSError, ai.ApsiError)) as info:
                ai.open(url, storage_options={"retries": 0})
            assert SECRET not in f"{info.value} {info.value!r}"


def test_options() -> None:
    with Server({"/f": DATA}, "needs_token", authorization="Bearer t") as server:
        assert source_of(server, token="t").size == len(DATA)
        with pytest.raises(PermissionError, match="it needs credentials"):
            source_of(server)
        for options, text in (
            ({"tokens": 1}, "'tokens' is not known"),
            ({"token": "a\nb"}, "'token' is no printable"),
            ({"timeout": "soon"}, "timeout is 'soon'"),
        ):
            with pytest.raises(ai.ValueRefusedError, match=text):
                ai.open(f"{server.url}/f", storage_options=options)
    for more in ({"storage_options": {"token": "x"}}, {"stream": True}):
        with pytest.raises(ai.ValueRefusedError, match="is a path"):
            ai.open("somewhere.gguf", **more)


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ssl

    from apsi_inspect.remote_http import _certificates

    pem = tmp_path / "localhost.pem"
    pem.write_bytes(self_signed())
    with Server({"/f": DATA}) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = f"https://localhost:{server.server_address[1]}/f"
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            RemoteSource(url)
        assert not server.requests
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        _certificates.cache_clear()
        source = RemoteSource(url)
        assert source.view(0, len(DATA)) == DATA
        assert source.read_at(5, 2_000_000) == DATA[5:2_000_005]
    _certificates.cache_clear()


def self_signed() -> bytes:
    """A key and a certificate for localhost."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=localhost")
    start = datetime.datetime(2020, 1, 1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, start, datetime.datetime(2120, 1, 1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server({"/f": DATA}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:word@"))
        monkeypatch.setenv("no_proxy", "")
        source = RemoteSource("http://far.example/f")
        assert source.read_at(0, 600_000) == DATA[:600_000]
        assert proxy.requests[0][0] == "http://far.example/f"
        assert proxy.heads[0]["proxy-authorization"] == "Basic bWU6d29yZA=="


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["https://host/", "https://host/a/", "https://host", "s3://bucket", "s3://bucket/a/"])
def test_folders_are_refused(url: str) -> None:
    with pytest.raises(ai.ValueRefusedError, match=r"is a folder.*model.safetensors"):
        ai.open(url)


@pytest.mark.parametrize("url", ["http:///a", "https://host:port/a", "http://[::1/a", "unheard://a/b"])
def test_addresses_that_mean_nothing(url: str) -> None:
    with pytest.raises(ai.ValueRefusedError):
        ai.open(url)


def test_a_name_with_spaces_and_the_file_beside_it() -> None:
    with Server({"/a b/m é.bin": DATA, "/a b/other %41.bin": b"beside"}) as server:
        source = RemoteSource(f"{server.url}/a b/m é.bin?token=x")
        assert source.name == f"{server.url}/a b/m é.bin"
        other = source.beside("other %41.bin")
        assert other.read_at(0, 6) == b"beside"
        assert other.name == f"{server.url}/a b/other %41.bin"
        assert server.requests[-1][0] == "/a%20b/other%20%2541.bin?token=x"


def test_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = handmade.safetensors([("a", "F32", [1], bytes(4))], {})
    paths = ["/org/repo/resolve/main/model.safetensors", "/org/repo/resolve/refs%2Fpr%2F1/sub/x.safetensors"]
    with Server({paths[0]: blob, "/org/repo/resolve/refs/pr/1/sub/x.safetensors": blob}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        with ai.open("hf://org/repo") as model:  # no index there
            assert model.path == "hf://org/repo/model.safetensors"
        assert [p.rpartition("/")[2] for p, _ in server.requests] == list(remote.HF_FILES)
        assert server.heads[-1]["authorization"] == "Bearer hf_secret"
        with ai.open("hf://org/repo@refs/pr/1/sub/x.safetensors", storage_options={"token": "mine"}) as model:
            assert model.path == "hf://org/repo@refs/pr/1/sub/x.safetensors"
        assert server.requests[-1][0] == paths[1]
        assert server.heads[-1]["authorization"] == "Bearer mine"
        with pytest.raises(ModelFileError, match=r"'model.safetensors.index.json' and 'model.safetensors' were tried"):
            ai.open("hf://org/empty")
        with pytest.raises(FileNotFoundError):
            ai.open("hf://org/repo/none.gguf")
        with pytest.raises(ai.ValueRefusedError, match="hf://ORGANISATION"):
            ai.open("hf://repo")


def test_file_urls(tmp_path: Path) -> None:
    path = tmp_path / "a b.gguf"
    path.write_bytes(Gguf().file([("general.architecture", "STRING", "x")]))
    assert ai.open(f"file://{str(path).replace(' ', '%20')}").format == "gguf"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package, url, hint in (
        ("gcsfs", "gs://bucket/a", "pip install gcsfs"), ("s3fs", "s3://bucket/a", r"apsi-inspect\[remote\]")
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingPackageError, match=f"needs the package {package}: .*{hint}"):
            ai.open(url)


def test_permissions_hold_for_urls() -> None:
    blob = handmade.safetensors([("a", "F32", [1], bytes(4))], {})
    with Server({"/ok/m.safetensors": blob, "/no/m.safetensors": blob}) as server:
        with ai.permissions(read=[f"{server.url}/ok"]):
            for stream in (False, True):
                assert len(ai.open(f"{server.url}/ok/m.safetensors", stream=stream)) == 1
                with pytest.raises(PermissionError):
                    ai.open(f"{server.url}/no/m.safetensors", stream=stream)
        assert not any("/no/" in p for p, _ in server.requests)


# -- stream=True ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.parametrize("fault", ["", "no_ranges", "busy", "hangs_up"])
def test_streaming(folder: Path, fault: str) -> None:
    with Server({"/f": DATA}, fault) as server:
        source = open_source(f"{server.url}/f?secret", stream=True)
        assert isinstance(source, DownloadedSource)
        assert source.name == f"{server.url}/f"
        assert source.view(0, len(DATA)) == DATA
        assert not list(folder.iterdir())
        source.close()


def test_streaming_begins_anew_where_it_broke(folder: Path) -> None:
    with Server({"/f": DATA}, "silent", silence=0.0) as server:
        assert open_source(f"{server.url}/f", stream=True).read_at(0, len(DATA)) == DATA
    with Server({"/f": DATA}, "always_drops") as server, pytest.raises(OSError, match="tried 2 times"):
        open_source(f"{server.url}/f", {"retries": 1}, stream=True)


def test_streaming_stops_before_the_disk_is_full(folder: Path) -> None:
    with Server({"/f": File(b"", 10**15)}, "no_ranges") as server, pytest.raises(ModelFileError, match="does not fit"):
        open_source(f"{server.url}/f", stream=True)
