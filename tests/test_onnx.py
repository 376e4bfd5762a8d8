"""ONNX models against onnx itself: every data type in every field, wherever tensors hide, external data, attacks."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import TensorProto, helper, numpy_helper

from apsi_inspect.encodings import ENCODINGS
from apsi_inspect.encodings.values import decode
from apsi_inspect.errors import ModelFileError
from apsi_inspect.formats.onnx_tensors import DATA_TYPES
from apsi_inspect.formats.protobuf import Wire
from apsi_inspect.model import Tensor
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.source import BytesSource

BACKEND = Path(onnx.backend.test.__file__).parent / "data"
KNOWN = [k for k in DATA_TYPES if k in TensorProto.DataType.values()]


def model_of(*tensors: TensorProto, **fields: Any) -> onnx.ModelProto:
    """A model with these initializers."""
    nodes, sparse = fields.pop("nodes", []), fields.pop("sparse", [])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    graph = helper.make_graph(nodes, "g", [x], [], initializer=tensors, sparse_initializer=sparse)
    return helper.make_model(graph, ir_version=10, **fields)


def save(path: Path, model: onnx.ModelProto) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def codes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The stored elements, codes of a quantized tensor too."""
    return decode(tensor.info.encoding, tensor.raw(), tensor.shape)


def same(found: Tensor, expected: TensorProto, base: str = "") -> None:
    wanted = numpy_helper.to_array(expected, base)
    values = codes(found)
    assert (values.dtype, values.shape) == (wanted.dtype, wanted.shape)
    assert values.tobytes() == wanted.tobytes(), found.name


def packed(kind: int, shape: tuple[int, ...], raw: bool) -> TensorProto:
    """A tensor of random bits, in raw_data or in its typed field."""
    encoding = ENCODINGS[DATA_TYPES[kind][1]]
    numel = int(np.prod(shape))
    nbytes = -(-numel * encoding.block_bytes // encoding.block_size)
    rng = np.random.default_rng(kind)
    data = rng.integers(0, 2 if encoding.name == "BOOL" else 256, nbytes, np.uint8)
    spare = 8 * nbytes - numel * int(encoding.bpw) if encoding.block_size > 1 else 0
    if spare:
        data[-1] &= 0xFF >> spare
    t = TensorProto(name=f"t{kind}", dims=shape, data_type=kind)
    if raw:
        t.raw_data = data.tobytes()
        return t
    values = numpy_helper.to_array(TensorProto(dims=shape, data_type=kind, raw_data=data.tobytes())).reshape(-1)
    _fill(t, kind, encoding.name, values, data)
    return t


def _fill(t: TensorProto, kind: int, name: str, values: np.ndarray[Any, Any], data: np.ndarray[Any, Any]) -> None:
    field = DATA_TYPES[kind][2]
    if name in ("F32", "F64"):
        (t.float_data if name == "F32" else t.double_data).extend(values.tolist())
    elif name in ("C64", "C128"):
        (t.float_data if name == "C64" else t.double_data).extend(values.view(f"f{values.itemsize // 2}").tolist())
    elif field == 11:
        t.uint64_data.extend(values.tolist())
    elif field == 7:
        t.int64_data.extend(values.tolist())
    elif name in ("F16", "BF16"):
        t.int32_data.extend(values.view(np.uint16).tolist())
    elif ENCODINGS[name].block_size > 1 and not name.startswith("F6"):
        t.int32_data.extend(data.tolist())  # two or four a byte
    else:
        t.int32_data.extend((values if values.dtype.kind in "iu" else values.view(np.uint8)).tolist())


@pytest.mark.parametrize("shape", [(5, 7), (), (1,), (0, 3), (4, 6)], ids=str)
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
@pytest.mark.parametrize("kind", KNOWN, ids=lambda k: DATA_TYPES[k][0])
def test_data_types(kind: int, raw: bool, shape: tuple[int, ...], tmp_path: Path) -> None:
    t = packed(kind, shape, raw)
    with open_model(save(tmp_path / "m.onnx", model_of(t))) as model:
        found = model[t.name]
        assert found.encoding == DATA_TYPES[kind][1]
        same(found, t)
        if found.numel and found.info.encoding.kind != "complex":
            assert found.stats().count == found.numel
        if found.ndim and found.numel:
            assert found[0].tobytes() == codes(found)[0].tobytes()


def test_every_data_type_is_known() -> None:
    known = {v for v in TensorProto.DataType.values() if v not in (TensorProto.UNDEFINED, TensorProto.STRING)}
    assert known <= set(DATA_TYPES)
    for value in known:
        assert TensorProto.DataType.Name(value) == DATA_TYPES[value][0]


def test_a_large_odd_tensor_of_small_integers(tmp_path: Path) -> None:
    t = packed(TensorProto.INT4, (1001, 1001), True)
    with open_model(save(tmp_path / "m.onnx", model_of(t))) as model:
        same(model[t.name], t)
        values = numpy_helper.to_array(t).astype(np.int64)
        s = model[t.name].stats()
        assert (s.min, s.max, s.zeros, s.count) == (-8, 7, (values == 0).sum(), values.size)
        assert s.mean == pytest.approx(values.mean())


def everything(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """All tensors of a model, as its definition lists the places."""

    def of_graph(graph: Any) -> Iterator[TensorProto]:
        yield from graph.initializer
        for s in graph.sparse_initializer:
            yield from (s.values, s.indices)
        for node in graph.node:
            yield from of_node(node)

    def of_node(node: Any) -> Iterator[TensorProto]:
        for a in node.attribute:
            if a.HasField("t"):
                yield a.t
            yield from a.tensors
            if a.HasField("sparse_tensor"):
                yield from (a.sparse_tensor.values, a.sparse_tensor.indices)
            for graph in [*([a.g] if a.HasField("g") else []), *a.graphs]:
                yield from of_graph(graph)

    yield from of_graph(model.graph)
    for f in model.functions:
        for node in f.node:
            yield from of_node(node)
    for info in model.training_info:
        yield from of_graph(info.initialization)
        yield from of_graph(info.algorithm)


def contents(path: Path) -> tuple[Counter[Any], Counter[Any]]:
    """(shape, bytes) of all tensors: of onnx and of ours."""
    wanted: Counter[Any] = Counter()
    for t in everything(onnx.load(path)):
        if t.data_type != TensorProto.STRING:
            values = numpy_helper.to_array(t)
            wanted[values.shape, values.tobytes()] += 1
    with open_model(path) as model:
        found = Counter((t.shape, codes(t).tobytes()) for t in model.values())
    return wanted, found


@pytest.mark.parametrize("folder", ["light", "simple", "pytorch-converted", "pytorch-operator"])
def test_models_of_onnx(folder: str) -> None:
    paths = sorted((BACKEND / folder).glob("**/*.onnx"))
    assert paths
    for path in paths:
        wanted, found = contents(path)
        assert not wanted - found, path


def nested() -> onnx.ModelProto:
    """Tensors in every hiding place, one name in several scopes."""

    def constant(name: str, value: float) -> Any:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.float32([value] * 3), name))

    def branch(name: str, value: float, nodes: Any = ()) -> Any:
        inner = numpy_helper.from_array(np.float32([value]), "shared")
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, [3])
        return helper.make_graph([constant(name, value), *nodes], name, [], [out], initializer=[inner])

    deep = helper.make_node("If", ["c"], ["d"], then_branch=branch("t2", 4), else_branch=branch("e2", 5))
    nodes = [
        helper.make_node(
            "If", ["c"], ["y"], name="if0", then_branch=branch("t", 2, [deep]), else_branch=branch("e", 3)
        ),
        constant("k", 1),
        helper.make_node("Constant", [], ["kf"], value_float=1.5),
        helper.make_node("Constant", [], ["ki"], value_ints=[1, -2, 3]),
        helper.make_node("ConstantOfShape", ["s"], ["f"], name="fill", value=numpy_helper.from_array(np.int64([7]))),
        helper.make_node("Scaler", ["x"], ["z"], domain="ai.onnx.ml", name="ml", scale=[0.5] * 20, offset=[1.0]),
        helper.make_node("Mine", ["x"], ["m"], domain="local"),
    ]
    inner = helper.make_node("Constant", [], ["fk"], value=numpy_helper.from_array(np.float64([9]), "fk"))
    function = helper.make_function("local", "Mine", ["x"], ["fk"], [inner], [helper.make_opsetid("", 18)])
    values = numpy_helper.from_array(np.float32([1, 2]), "sp")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.int64([0, 5]), "spi"), [2, 3])
    shared = numpy_helper.from_array(np.float32([1]), "shared")
    text = helper.make_tensor("words", TensorProto.STRING, [2], [b"a", b"b"])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("local", 1)]
    return model_of(shared, text, nodes=nodes, sparse=[sparse], functions=[function], opset_imports=opsets)


def test_where_tensors_hide(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", nested())
    wanted, found = contents(path)
    assert not wanted - found
    with open_model(path) as model:
        assert set(model) == {
            "shared", "sp.values", "sp.indices", "t", "e", "k", "kf", "ki", "fill.value", "ml.scale", "fk",
            "if0.then_branch/shared", "if0.else_branch/shared", "t2", "e2",
            "if0.then_branch/d.then_branch/shared", "if0.then_branch/d.else_branch/shared",
        }  # fmt: skip
        assert (model["kf"].numpy().tolist(), model["ki"].numpy().tolist()) == (1.5, [1, -2, 3])
        assert model["ml.scale"].numpy().tolist() == [0.5] * 20
        assert model.metadata == {"words": "STRING 2, 2 texts", "sp": "sparse 2 × 3; its values and indices are listed"}
        assert model.facts["opsets"] == "ai.onnx 18, ai.onnx.ml 3, local 1"
        assert model.facts["inputs"] == "x: FLOAT n × 3"
        assert model.facts["subgraphs"] == 4
        assert "ai.onnx.ml.Scaler ×1" in model.facts["operators"]


def test_metadata_and_facts(tmp_path: Path) -> None:
    m = model_of(producer_name="me", producer_version="1.2", opset_imports=[helper.make_opsetid("", 21)])
    helper.set_model_props(m, {"author": "someone", "ünï": "cødé"})
    with open_model(save(tmp_path / "m.onnx", m)) as model:
        assert model.metadata == {"author": "someone", "ünï": "cødé"}
        assert (model.facts["producer"], model.facts["producer version"], model.facts["ir version"]) == (
            "me",
            "1.2",
            10,
        )


def wrong(**fields: Any) -> TensorProto:
    return TensorProto(**{"name": "w", "dims": [4], "data_type": 1, "raw_data": bytes(16), **fields})


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (wrong(raw_data=bytes(15)), "size mismatch"),
        (wrong(raw_data=bytes(17)), "size mismatch"),
        (wrong(dims=[-1, 4]), "dimensions"),
        (wrong(dims=[1 << 40, 1 << 30]), "no file can hold"),
        (wrong(dims=[1] * 65, raw_data=bytes(4)), "dimensions"),
        (wrong(data_type=0), "data type 0"),
        (wrong(data_type=99), "data type 99"),
        (TensorProto(name="w", dims=[4], data_type=1, float_data=[1, 2]), "2 values in float_data"),
        (TensorProto(name="w", dims=[4], data_type=1, int32_data=[1, 2, 3, 4]), "0 values in float_data"),
        (TensorProto(name="w", dims=[2], data_type=7, int64_data=[1, 2, 3]), "3 values in int64_data"),
        (TensorProto(name="w", dims=[5], data_type=22, int32_data=[1, 2]), "2 values in int32_data"),
        (wrong(segment=TensorProto.Segment(begin=0, end=2)), "segment"),
    ],
)
def test_tensors_that_do_not_fit(tensor: TensorProto, word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=word) as caught:
        open_model(save(tmp_path / "m.onnx", model_of(tensor)))
    assert "'w'" in str(caught.value)


def test_values_written_singly_and_in_runs(tmp_path: Path) -> None:
    """Protobuf allows a repeated field unpacked, and packed in several runs."""
    good = TensorProto(name="w", dims=[4], data_type=7, int64_data=[1, -2, 300, -(1 << 63)])
    odd = TensorProto(name="w", dims=[4], data_type=7).SerializeToString()
    for value in (1, -2, 300, -(1 << 63)):
        part = TensorProto(int64_data=[value]).SerializeToString()  # tag, length, varint
        odd += part if value in (1, 300) else bytes([7 << 3]) + part[2:]
    assert onnx.load_tensor_from_string(odd).int64_data == good.int64_data
    floats = TensorProto(name="f", dims=[3], data_type=1).SerializeToString()
    floats += b"".join(b"\x25" + np.float32(v).tobytes() for v in (1, 2)) + b"\x22\x04" + np.float32(3).tobytes()
    graph = b"".join(b"\x2a" + bytes([len(t)]) + t for t in (odd, floats))
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a\x42\x02\x10\x12\x3a" + bytes([len(graph)]) + graph)
    with open_model(tmp_path / "m.onnx") as model:
        assert sorted(model["w"].numpy().tolist()) == sorted(good.int64_data)
        assert sorted(model["f"].numpy().tolist()) == [1, 2, 3]


def test_cut_and_changed_anywhere(tmp_path: Path) -> None:
    whole = nested().SerializeToString()
    path = tmp_path / "m.onnx"
    for n in range(0, len(whole), 3):
        path.write_bytes(whole[:n])
        try:
            open_model(path).close()
        except ModelFileError as exc:
            assert "m.onnx" in str(exc)  # noqa: PT017
    for i in range(0, len(whole), 2):
        path.write_bytes(bytes([*whole[:i], whole[i] ^ 0x11, *whole[i + 1 :]]))
        try:
            open_model(path).close()
        except ModelFileError as exc:
            assert "m.onnx" in str(exc)  # noqa: PT017


def test_deep_graphs_are_refused(tmp_path: Path) -> None:
    graph = b""
    for _ in range(200):  # a graph in an attribute of a node of a graph …
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            graph = tag + _length(graph) + graph
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x0a\x3a" + _length(graph) + graph)
    with pytest.raises(ModelFileError, match="nested deeper"):
        open_model(path)


def _length(data: bytes) -> bytes:
    n, out = len(data), b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


@pytest.mark.parametrize(
    "raw", [b"\x0b", b"\x0e", b"\x08", b"\x08" + b"\xff" * 11, b"\x12\x05ab", b"\x00\x01", b"\x0d\x00"]
)
def test_wire_errors(raw: bytes) -> None:
    with pytest.raises(ModelFileError, match="protobuf"):
        list(Wire(BytesSource(raw)).fields(0, len(raw)))


def test_a_large_model(tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    """1.6 GB of raw data in a sparse file, and 5 GB beside it: nothing of either is read."""
    size = 400 << 20
    path = tmp_path / "m.onnx"
    proto = TensorProto(name="w", dims=[size // 4], data_type=1).SerializeToString()
    head = b"\x4a" + _length_of(size)
    outside = TensorProto(name="x", dims=[5 << 28], data_type=1, data_location=1)
    outside.external_data.add(key="location", value="x.bin")
    other = outside.SerializeToString()
    tensor = len(proto) + len(head) + size
    graph = 4 * (1 + len(_length_of(tensor)) + tensor) + 1 + len(_length_of(len(other))) + len(other)
    with open(path, "wb") as f:
        f.write(b"\x08\x0a\x42\x02\x10\x12\x3a" + _length_of(graph) + b"\x2a" + _length_of(len(other)) + other)
        for i in range(4):
            f.write(b"\x2a" + _length_of(tensor) + proto.replace(b"w", b"%d" % i) + head)
            f.seek(size, 1)
        f.truncate()
    with open(tmp_path / "x.bin", "wb") as f:
        f.truncate(5 << 30)
    code = (
        "import time\nt = time.process_time(); m = open_model(sys.argv[1]); s = time.process_time() - t\n"
        "print(sorted(m), s < 0.5, m['3'].offset + m['3'].nbytes == m.sources[0].size)"
    )
    printed, grew = measured(code, path)
    assert printed == "['0', '1', '2', '3', 'x'] True True"
    assert grew < 20


def _length_of(n: int) -> bytes:
    out = b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def test_info_imports_neither_numpy_nor_onnx(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", nested())
    code = (
        "import sys; from apsi_inspect.cli import main\nassert main(['model', 'info', sys.argv[1]]) == 0\n"
        "print([m for m in ('numpy', 'torch', 'onnx', 'google', 'pandas', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert "ONNX" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_opening_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", nested())
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with open_model(path) as model:
        str(model)
        [codes(t) for t in model.values()]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_a_name_that_comes_again_and_again(tmp_path: Path) -> None:
    """Numbering takes time in proportion to how many there are."""
    graph = onnx.GraphProto(name="g")
    graph.initializer.extend([onnx.TensorProto(name="w", data_type=1, dims=[1], float_data=[1.0])] * 20_000)
    (tmp_path / "m.onnx").write_bytes(onnx.ModelProto(ir_version=8, graph=graph).SerializeToString())
    start = time.process_time()
    names = list(open_model(tmp_path / "m.onnx"))
    assert (names[:3], names[-1], len(names)) == (["w", "w~2", "w~3"], "w~20000", 20_000)
    assert time.process_time() - start < 10


def test_a_million_small_nodes(tmp_path: Path) -> None:
    """Nodes are counted in a time that grows with their number, a few microseconds each."""
    n = 100_000
    relu = b"\x0a\x0c\x0a\x01x\x12\x01y\x22\x04Relu"  # field 1, a NodeProto: input x, output y, op_type Relu
    foreign = b"\x0a\x08\x22\x03Foo\x3a\x01d"  # op_type Foo, domain d

    def opened(times: int) -> tuple[float, Any]:
        body = (relu + foreign) * times
        size, length = len(body), bytearray()
        while size:
            length.append(size & 0x7F | (0x80 if size > 0x7F else 0))
            size >>= 7
        path = tmp_path / f"{times}.onnx"
        path.write_bytes(b"\x08\x08\x3a" + bytes(length) + body)
        start = time.process_time()
        model = open_model(path)
        return time.process_time() - start, model.facts

    small, _ = opened(n // 4)
    large, facts = opened(n)
    assert facts["nodes"] == 2 * n
    assert facts["operators"] == f"Relu ×{n}, d.Foo ×{n}"
    assert large < 12 * small + 1
    assert large < 10
