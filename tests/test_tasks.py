"""Tasks over tensors: order, window, cancellation and errors with every executor; specs of every kind of tensor."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import apsi_inspect as ai
from apsi_inspect.errors import ApsiError, ModelFileError, ValueRefusedError
from apsi_inspect.model import ModelFile
from apsi_inspect.ops.open import open_source
from apsi_inspect.ops.tasks import run_tasks, source_of, source_spec, spec_of, tensor_of
from apsi_inspect.source import BytesSource, FileSource

from .test_affine import SCALES, qdq


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        yield pool


@pytest.fixture(params=["none", "threads", "processes"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    if request.param == "processes":
        yield request.getfixturevalue("processes")
    elif request.param == "threads":
        with ThreadPoolExecutor(3) as pool:
            yield pool
    else:
        yield None


def slower_at_first(i: int, n: int) -> int:
    time.sleep(0.002 * (n - i) if i < 5 else 0)
    return i * i


def refuses(i: int) -> int:
    if i == 3:
        raise ModelFileError("f", f"task {i}", "here", "a hint")
    return i


def dies(i: int) -> int:
    if i == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


class TestRun:
    def test_order(self, executor: Executor | None) -> None:
        found = list(run_tasks(slower_at_first, ((i, 40) for i in range(40)), executor, window=7))
        assert found == [i * i for i in range(40)]

    def test_nothing_to_do(self, executor: Executor | None) -> None:
        assert list(run_tasks(refuses, [], executor)) == []

    def test_an_error_comes_through_whole(self, executor: Executor | None) -> None:
        results = run_tasks(refuses, ((i,) for i in range(100)), executor, window=5)
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ModelFileError) as caught:
            next(results)
        e = caught.value
        assert (e.file, e.reason, e.where, e.hint) == ("f", "task 3", "here", "a hint")
        assert list(results) == []

    def test_the_window_bounds_what_is_in_flight(self) -> None:
        taken = 0

        def tasks() -> Iterator[tuple[int]]:
            nonlocal taken
            for i in range(100):
                taken += 1
                yield (i,)

        with ThreadPoolExecutor(2) as pool:
            results = run_tasks(int, tasks(), pool, window=8)
            for i in range(100):
                assert next(results) == i
                assert taken <= i + 8

    def test_a_dead_process_is_said(self) -> None:
        with (
            ProcessPoolExecutor(1, get_context("spawn")) as pool,
            pytest.raises(ApsiError, match=r"worker process ended.*new executor"),
        ):
            list(run_tasks(dies, ((i,) for i in range(10)), pool))


class Held(Executor):
    """An executor that does nothing by itself; the test says what happens."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


class TestCancel:
    def test_ctrl_c(self) -> None:
        held = Held()
        results = run_tasks(int, ((i,) for i in range(100)), held, window=4)
        threading.Timer(0.05, lambda: held.futures[0].set_exception(KeyboardInterrupt())).start()
        with pytest.raises(KeyboardInterrupt):
            next(results)
        assert len(held.futures) == 4
        assert all(f.cancelled() for f in held.futures[1:])

    def test_leaving_early(self) -> None:
        held = Held()
        results = run_tasks(int, ((i,) for i in range(100)), held, window=4)
        threading.Timer(0.05, lambda: held.futures[0].set_result(0)).start()
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        assert all(f.cancelled() for f in held.futures[1:])

    def test_an_error_of_the_tasks_themselves(self) -> None:
        held = Held()

        def tasks() -> Iterator[tuple[int]]:
            yield (1,)
            raise ValueError("no more")

        with pytest.raises(ValueError, match="no more"):
            next(run_tasks(int, tasks(), held))
        assert held.futures[0].cancelled()


def safetensors(folder: Path) -> Path:
    arrays = {
        "f32": np.arange(12, dtype=np.float32).reshape(3, 4), "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
        "i64": np.array([2**62, -5]), "bool": np.array([True, False]), "empty": np.empty((0, 4), np.float32),
        "scalar": np.array(3.5), "c64": np.array([1 + 2j], np.complex64),
    }  # fmt: skip
    save_file(arrays, folder / "m.safetensors")
    return folder / "m.safetensors"


def gguf(folder: Path) -> Path:
    return ai.samples.write(folder, ["tiny-llama.gguf"])[0]


def big_endian(folder: Path) -> Path:
    from gguf import GGUFEndian, GGUFWriter

    writer = GGUFWriter(folder / "big.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.add_tensor("a", np.arange(6, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "big.gguf"


def apsim(folder: Path) -> Path:
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    formats = ("int8", "int4", "fp8", "fp6", "fp4", "bf16")
    tree: dict[str, Any] = {f: ai.quantize(x, f) for f in formats}
    tree |= {"across": ai.quantize(x, "int4", axis=0, block=4), "plain": x}
    return Path(ai.save_model(folder / "m.apsim", tree))


def sharded(folder: Path) -> Path:
    ai.convert(gguf(folder), folder / "s" / "m.safetensors", shard="100kB") if (folder / "s").mkdir() is None else None
    return folder / "s"


def torch_views(folder: Path) -> Path:
    torch = pytest.importorskip("torch")
    x = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "plain": x, "transposed": x.T, "strided": x[:, ::2], "expanded": x[:1].expand(7, 6), "part": x[1:3],
        "conj": (x + 1j * x).conj(),
    }  # fmt: skip
    torch.save(state, folder / "m.pt")
    return folder / "m.pt"


def torch_quantized(folder: Path) -> Path:
    torch = pytest.importorskip("torch")
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    scales, zeros = torch.tensor([0.01, 0.02, 0.03, 0.04]), torch.tensor([0, 1, 2, 3])
    state = {
        "whole": torch.quantize_per_tensor(x, 0.01, 3, torch.qint8),
        "rows": torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8),
    }
    torch.save(state, folder / "q.pt")
    return folder / "q.pt"


def numpy_in_a_pickle(folder: Path) -> Path:
    torch = pytest.importorskip("torch")
    torch.save({"inline": np.arange(5.0), "t": torch.ones(3)}, folder / "n.pt")
    return folder / "n.pt"


def deflated(folder: Path) -> Path:
    import zipfile

    torch_views(folder)
    with zipfile.ZipFile(folder / "m.pt") as old, zipfile.ZipFile(folder / "z.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return folder / "z.pt"


def onnx_of(*tensors: TensorProto) -> Any:
    graph = helper.make_graph([], "g", [], [], initializer=list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def onnx_typed(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    typed = [
        helper.make_tensor("floats", TensorProto.FLOAT, [5], rng.normal(size=5)),
        helper.make_tensor("varints", TensorProto.INT32, [6], rng.integers(-1000, 1000, 6)),
        helper.make_tensor("halves", TensorProto.FLOAT16, [4], np.arange(4.0)),
        helper.make_tensor("nibbles", TensorProto.INT4, [5], np.arange(5)),
        numpy_helper.from_array(np.arange(7), "raw"),
    ]
    onnx.save_model(onnx_of(*typed), folder / "t.onnx")
    return folder / "t.onnx"


def onnx_external(folder: Path) -> Path:
    tensors = [numpy_helper.from_array(np.arange(n, dtype=np.float32), f"t{n}") for n in (300, 400)]
    onnx.save_model(
        onnx_of(*tensors), folder / "e.onnx", save_as_external_data=True, location="e.data", size_threshold=0
    )
    return folder / "e.onnx"


KINDS: dict[str, Callable[[Path], Path]] = {
    f.__name__: f
    for f in (
        safetensors, gguf, big_endian, apsim, sharded, torch_views, torch_quantized, numpy_in_a_pickle, deflated,
        onnx_typed, onnx_external,
    )
}  # fmt: skip
KINDS |= {f"onnx qdq, {how}": lambda folder, how=how: _qdq(folder, how) for how in SCALES}  # type: ignore[misc]


def _qdq(folder: Path, how: str) -> Path:
    qdq(folder / "q.onnx", "int8", how)
    return folder / "q.onnx"


def read(blob: bytes) -> tuple[Any, ...]:
    """In a worker: everything that a spec gives back."""
    tensor = tensor_of(pickle.loads(blob))
    values = tensor.numpy() if tensor.encoding != "C32" else np.empty(0)
    return (tensor.name, tensor.encoding, tensor.shape, values.dtype.name, values.tobytes(), bytes(tensor.raw()))


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor(kind: str, tmp_path: Path, processes: Executor) -> None:
    with ai.open(KINDS[kind](tmp_path)) as model:
        assert len(model)
        blobs = [pickle.dumps(spec_of(t)) for t in model.values()]
        for tensor, found in zip(model.values(), run_tasks(read, ((b,) for b in blobs), processes), strict=True):
            values = tensor.numpy()
            expected = (tensor.name, tensor.encoding, tensor.shape, values.dtype.name, values.tobytes())
            assert found == (*expected, bytes(tensor.raw()))


def test_a_spec_is_small(tmp_path: Path) -> None:
    with ai.open(gguf(tmp_path)) as model:
        assert all(len(pickle.dumps(spec_of(t))) < 1000 for t in model.values())


def test_a_relative_path_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors(tmp_path)
    monkeypatch.chdir(tmp_path)
    with ai.open("m.safetensors") as model:
        spec = spec_of(model["f32"])
    monkeypatch.chdir("/")
    assert tensor_of(spec).numpy().tolist() == np.arange(12.0).reshape(3, 4).tolist()


def test_no_header_is_read_for_plain_bytes(tmp_path: Path) -> None:
    path = safetensors(tmp_path)
    with ai.open(path) as model:
        spec = spec_of(model["f32"])
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[:16] = b"\xff" * 16
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tensor_of(spec).numpy().tolist() == np.arange(12.0).reshape(3, 4).tolist()


@pytest.mark.parametrize("before", [False, True])  # with the file in the cache already, or not
@pytest.mark.parametrize("how", ["rewritten", "replaced", "grown", "gone"])
@pytest.mark.parametrize("make", [safetensors, torch_views])
def test_a_changed_file_is_refused(make: Callable[[Path], Path], how: str, before: bool, tmp_path: Path) -> None:
    path = make(tmp_path)
    with ai.open(path) as model:
        spec = spec_of(list(model.values())[1])
    if before:
        tensor_of(spec).numpy()
    data, stat = path.read_bytes(), path.stat()
    if how in ("replaced", "gone"):
        path.unlink()
    if how != "gone":
        path.write_bytes(data + b"x" if how == "grown" else data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (0 if how == "grown" else 1)))
        with pytest.raises(ModelFileError, match=r"has changed.*begin again"):
            tensor_of(spec)
        return
    with pytest.raises(FileNotFoundError):
        tensor_of(spec)


def test_the_model_itself_need_not_be_open(tmp_path: Path) -> None:
    model: ModelFile = ai.open(safetensors(tmp_path))
    spec = spec_of(model["f32"])
    model.close()
    assert tensor_of(spec).numpy().sum() == 66


def test_memory_is_refused(tmp_path: Path) -> None:
    model = open_source(BytesSource(safetensors(tmp_path).read_bytes(), "<upload>"))
    with pytest.raises(ValueRefusedError, match=r"<upload>.*in memory"):
        spec_of(model["f32"])


def test_many_files_hold_no_descriptors(tmp_path: Path) -> None:
    specs = []
    for i in range(200):
        (tmp_path / f"{i}").write_bytes(bytes([i]) * 10)
        with FileSource(tmp_path / f"{i}") as source:
            specs.append(source_spec(source))
    before = len(os.listdir("/proc/self/fd"))
    assert [bytes(source_of(s).read_at(0, 10)) for s in specs] == [bytes([i]) * 10 for i in range(200)]
    assert len(os.listdir("/proc/self/fd")) <= before
