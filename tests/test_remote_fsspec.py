"""Files through fsspec: an S3 server (moto) through s3fs, and fsspec's own memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect import remote_fsspec
from apsi_inspect.errors import ModelFileError
from apsi_inspect.remote import BLOCK, RemoteSource

from . import handmade

DATA = np.random.default_rng(0).standard_normal((3000, 500)).astype(np.float32)
MODEL = handmade.safetensors([("a", "F32", [3000, 500], DATA.tobytes()), ("b", "F32", [2], bytes(8))], {"k": "v"})


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, dict[str, Any]]:
    """A new bucket: its address, a client of its own (boto3), and the storage options."""
    import boto3
    import s3fs

    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote_fsspec, "PAUSE", 0.01)
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s3cr3t", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, **keys)
    name = f"models-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    s3fs.S3FileSystem.clear_instance_cache()
    return f"s3://{name}", client, {"key": "k", "secret": "s3cr3t", "client_kwargs": {"endpoint_url": endpoint}}


def put(bucket: tuple[str, Any, dict[str, Any]], key: str, data: bytes) -> str:
    url, client, _ = bucket
    client.put_object(Bucket=url[5:], Key=key, Body=data)
    return f"{url}/{key}"


def test_a_model_on_s3(bucket: tuple[str, Any, dict[str, Any]]) -> None:
    url = put(bucket, "m/model.safetensors", MODEL)
    with ai.open(url, storage_options=bucket[2]) as model:
        assert model.path == url
        assert dict(model.metadata) == {"k": "v"}
        source: Any = model.sources[0]
        assert source.requests == 2  # its size, and the head
        np.testing.assert_array_equal(model["a"].numpy(), DATA)
        before = source.received
        np.testing.assert_array_equal(model["a"][2000:2003], DATA[2000:2003])
        assert source.received - before <= 2 * BLOCK
        assert "s3cr3t" not in f"{model!r}{source!r}"


def test_shards_on_s3(bucket: tuple[str, Any, dict[str, Any]]) -> None:
    import json

    put(bucket, "m/one.safetensors", MODEL)
    put(bucket, "m/two.safetensors", handmade.safetensors([("c", "U8", [3], b"abc")], {}))
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    url = put(bucket, "m/model.safetensors.index.json", index)
    with ai.open(url, storage_options=bucket[2]) as model:
        assert list(model) == ["a", "b", "c"]
        assert bytes(model["c"].raw()) == b"abc"
    assert ai.load_safetensors(url, storage_options=bucket[2]).c.tobytes() == b"abc"


def test_what_is_not_there(bucket: tuple[str, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    url = put(bucket, "m/a.gguf", b"x")
    for missing in (f"{bucket[0]}/none.gguf", "s3://no-such-bucket-here/none.gguf"):
        with pytest.raises(FileNotFoundError) as info:
            ai.open(missing, storage_options=bucket[2])
        assert info.value.filename == missing
    with pytest.raises(ModelFileError, match="is a folder"):
        ai.open(url.rpartition("/")[0], storage_options=bucket[2])
    monkeypatch.setattr(remote_fsspec, "RETRIES", 0)
    with pytest.raises(OSError, match=url):
        ai.open(url, storage_options={**bucket[2], "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}})


def test_a_change_is_noticed(bucket: tuple[str, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_fsspec, "_AGE", 0.0)
    url = put(bucket, "m.bin", MODEL)
    source = RemoteSource(url, bucket[2])
    assert source.read_at(1_000_000, 9) == MODEL[1_000_000:1_000_009]
    put(bucket, "m.bin", MODEL[::-1])
    with pytest.raises(ModelFileError, match="has changed"):
        source.read_at(5_000_000, 9)


def test_streaming_from_s3(bucket: tuple[str, Any, dict[str, Any]]) -> None:
    url = put(bucket, "m.safetensors", MODEL)
    with ai.open(url, storage_options=bucket[2], stream=True) as model:
        assert model.path == url
        np.testing.assert_array_equal(model["a"].numpy(), DATA)


def test_memory_of_fsspec() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/m/x.safetensors", MODEL)
    with ai.open("memory://m/x.safetensors") as model:
        np.testing.assert_array_equal(model["a"].numpy(), DATA)
    fsspec.filesystem("memory").pipe("/m/empty", b"")
    with pytest.raises(ModelFileError, match="is empty"):
        ai.open("memory://m/empty")
