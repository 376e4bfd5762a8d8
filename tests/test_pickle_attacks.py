"""Attacks by pickle: no code runs, nothing is imported, memory and time stay bounded; each is refused or reported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from apsi_inspect.errors import ModelFileError
from apsi_inspect.formats import torch_tree
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.scan import scan
from apsi_inspect.ops.torch import torch_load

from .torch_zip import EMPTY_HOOKS, Entry, archive, file, integer, numbers, state_dict, storage, tensor, text

CANARY = "canary"
COMMAND = text(f"touch {CANARY}")
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."

# name -> opcodes of a value; each would run something if Python's own unpickler followed it
PAYLOADS = {
    "reduce": b"cos\nsystem\n" + COMMAND + b"\x85R",
    "posix": b"cposix\nsystem\n" + COMMAND + b"\x85R",
    "inst": b"(" + COMMAND + b"ios\nsystem\n",
    "obj": b"(cos\nsystem\n" + COMMAND + b"o",
    "newobj": b"csubprocess\nPopen\n" + COMMAND + b"\x85\x81",
    "newobj_ex": b"csubprocess\nPopen\n" + COMMAND + b"\x85}\x92",
    "stack global": b"\x8c\x02os\x8c\x06system\x93" + COMMAND + b"\x85R",
    "name from the memo": text("os") + b"q\x050" + text("system") + b"q\x060h\x05h\x06\x93" + COMMAND + b"\x85R",
    "memo slot written twice": (
        text("x") + b"q\x05" + text("os") + b"q\x0500h\x05" + text("system") + b"\x93" + COMMAND + b"\x85R"
    ),
    "memoize after put": text("os") + b"q\x00\x940" + b"h\x01" + text("system") + b"\x93" + COMMAND + b"\x85R",
    "thrown away": b"cos\nsystem\n" + COMMAND + b"\x85R0K\x01",
    "eval": b"c__builtin__\neval\n" + text("1") + b"\x85R",
    "getattr": b"c__builtin__\ngetattr\ncmath\npi\n" + text("real") + b"\x86R",
    "dotted name": b"\x8c\x04math\x8c\x14__loader__.load_code\x93",
    "partial": b"cfunctools\npartial\ncos\nsystem\n" + COMMAND + b"\x86R)R",
    "nested loads": b"cpickle\nloads\nC\x04\x80\x02N.\x85R",
    "torch.load": b"ctorch\nload\n" + text("other.pt") + b"\x85R",
    "storage of another type": storage("0", 4, "system", "os"),
    "built attribute": b"ctorch._utils\n_rebuild_tensor_v2\n}" + text("a") + text("os") + b"sb",
    "computed name": b"]" + text("system") + b"\x93",
    "extension": b"\x82\x07",
    "result called": b"cmath\npow\n)R)R",
}


def legacy(value: bytes) -> bytes:
    return LEGACY + b"\x80\x02" + value + b".\x80\x02]."


WRAPPED = {
    "zip": lambda value: file(state_dict(a=value, w=tensor("0", 4, [4], [1])), {"0": bytes(16)}),
    "stacked": legacy,
    "plain": lambda value: b"\x80\x04" + value + b".",
}


@pytest.mark.parametrize("container", WRAPPED)
@pytest.mark.parametrize("name", PAYLOADS)
def test_no_code_runs(name: str, container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    path.write_bytes(WRAPPED[container](PAYLOADS[name]))
    with pytest.raises(ModelFileError):
        open_model(path)
    report = scan(path)
    assert report.verdict == "unsafe"
    assert report.findings[0].severity == "error"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_nothing_is_imported(tmp_path: Path) -> None:
    """The names of a pickle, all of them importable, in a process of its own."""
    wanted = ("this", "antigravity", "turtle", "idlelib.run", "torch", "numpy", "onnx", "smtplib", "xmlrpc.client")
    value = b"(" + b"".join(f"c{module}\nsomething\n)R".encode() for module in wanted) + b"l"
    (tmp_path / "model.pt").write_bytes(file(state_dict(a=value, w=tensor("0", 4, [4], [1])), {"0": bytes(16)}))
    code = (
        "import sys; from apsi_inspect.ops.scan import scan; from apsi_inspect.ops.open import open\n"
        "before = set(sys.modules)\nr = scan('model.pt')\n"
        "try:\n    open('model.pt')\nexcept Exception as exc:\n    print(type(exc).__name__)\n"
        "print(r.verdict, [n.path.rpartition('.')[0] for n in r.globals if n.path.endswith('something')])\n"
        f"print([m for m in {wanted!r} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "ModelFileError"
    assert lines[1].startswith("unsafe")
    assert all(repr(module) in lines[1] for module in wanted)
    assert lines[2] == "[]"


def test_a_fifth_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(LEGACY + b"\x80\x02}.\x80\x02" + PAYLOADS["reduce"] + b".")
    with pytest.raises(ModelFileError, match=r"os\.system"):
        open_model(path)
    assert scan(path).verdict == "unsafe"


def test_cut_after_the_payload(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(file(b"\x80\x02" + PAYLOADS["reduce"]))
    with pytest.raises(ModelFileError, match=r"os\.system"):
        open_model(path)
    assert scan(path).verdict == "unsafe"


def laughs(depth: int, ending: bytes) -> bytes:
    """A list of twice a list of twice …: 2 ** depth leaves in a few bytes."""
    out = b"]K\x01aq\x00"
    for i in range(depth):
        out += b"0](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
    return out + ending


HUGE = {
    "billion laughs": file(state_dict(a=laughs(60, b""))),
    "tuples of tuples": file(state_dict(a=b"K\x01\x85q\x00" + b"h\x00h\x00\x86q\x00" * 60)),
    "deep lists": file(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."),
    "empty dicts": file(b"\x80\x02(" + b"}" * 3_000_000 + b"l."),
    "pairs copied": file(
        b"\x80\x02]q\x00("
        + b"K\x01K\x01\x86" * 50_000
        + b"e0("
        + b"ccollections\nOrderedDict\nh\x00\x85R" * 3000
        + b"l."
    ),
    "long names": file(state_dict(a=b"}" + (text("k" * 4000) + b"}") * 190 + b"s" * 190)),
    "a long integer": file(state_dict(a=b"\x8b" + (8_000_000).to_bytes(4, "little") + b"\x7f" * 8_000_000)),
    "a huge string": file(b"\x80\x02X\xff\xff\xff\x7fab."),
    "an expanded tensor": file(state_dict(e=tensor("0", 4, [1 << 20, 1 << 20], [0, 0])), {"0": bytes(16)}),
    "a bomb": file(state_dict(w=tensor("0", 4, [4], [1])), {"0": bytes(50 << 20)}, method=8),
    "a huge storage": file(state_dict(w=tensor("0", 1 << 60, [4], [1])), {"0": bytes(16)}),
    "a bomb in the pickle": archive([Entry("m/data.pkl", bytes(100 << 20), 8)]),
    "many names": file(state_dict(a=b"(" + b"".join(b"cm\nf%d\n" % i for i in range(200_000)) + b"l")),
    "long names of empty dicts": file(
        b"\x80\x02" + text("k" * 4000) + b"q\x000" + b"}h\x00" * 190 + b"(" + b"}" * 900_000 + b"l" + b"s" * 190 + b"."
    ),
    "a text encoded often": file(
        state_dict(
            a=text("\xe9" * 15_000_000) + b"q\x000c_codecs\nencode\nq\x010h\x00" + text("latin1") + b"\x86q\x020"
            b"(" + b"h\x01h\x02R" * 200_000 + b"l"
        )
    ),
    "a list that is no dict": file(
        b"\x80\x02]q\x00(" + b"K\x01K\x02\x86q\x01" + b"h\x01" * 300_000 + b"K\x05e0c__builtin__\ndict\nq\x020"
        b"h\x00\x85q\x030(" + b"h\x02h\x03R" * 300_000 + b"l."
    ),
    "a path of one text": file(
        state_dict(a=text("a" * 1_000_000) + b"q\x000cpathlib\nPosixPath\n(" + b"h\x00" * 20_000 + b"tR")
    ),
    "a device of one text": file(
        state_dict(a=text("a" * 1_000_000) + b"q\x000ctorch\ndevice\n(" + b"h\x00" * 20_000 + b"tR")
    ),
    "a device of a long integer": file(
        state_dict(a=b"ctorch\ndevice\n" + text("cuda") + b"\x8b\x00\x20\x00\x00" + b"\x7f" * 8192 + b"\x86R")
    ),
    "a complex of a long integer": file(
        state_dict(a=b"c__builtin__\ncomplex\nK\x01\x8a\xff" + b"\x7f" * 255 + b"\x86R")
    ),
    "bytearrays of bytearrays": file(
        state_dict(a=b"C\x01a" + b"q\x000c__builtin__\nbytearray\nq\x010h\x00" + b"q\x020h\x01h\x02\x85R" * 5000)
    ),
    "scales of scales": file(
        b"\x80\x02" + tensor("0", 4, [4], [1]) + b"q\x00q\x010ctorch\nper_channel_affine\nq\x030"
        b"ctorch._utils\n_rebuild_qtensor\nq\x040"
        + storage("1", 16, "QInt8Storage")
        + b"q\x050N"
        + b"0h\x04(h\x05K\x00K\x04\x85K\x01\x85(h\x03h\x01h\x00K\x00t\x89NtRq\x01" * 2000
        + b".",
        {"0": bytes(16), "1": bytes(16)},
    ),
    "stacked claims": (
        LEGACY
        + (b"\x80\x02" + tensor("0", 1 << 60, [4], [1]) + b".")
        + (b"\x80\x02](" + text("0") + b"e." + b"\xff" * 7 + b"\x0f")
    ),
}
OPENS = (
    "long names",
    "a long integer",
    "an expanded tensor",
    "a path of one text",
    "a device of one text",
    "a device of a long integer",
    "a complex of a long integer",
    "bytearrays of bytearrays",
)


@pytest.mark.parametrize("what", HUGE)
def test_bounded(what: str, tmp_path: Path, measured: Callable[..., tuple[str, float]]) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(HUGE[what])
    code = (
        "from apsi_inspect.ops.scan import scan\nscan(sys.argv[1])\n"
        "try:\n    m = open_model(sys.argv[1]); len(str(m)); print('opens')\nexcept ApsiError as exc:\n    print(exc)"
    )
    printed, grew = measured(code, path, seconds=60)
    assert (printed == "opens") == (what in OPENS), printed
    assert grew < 400
    assert len(printed) < 700


def test_an_expanded_tensor_is_read_in_part_only(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(HUGE["an expanded tensor"])
    with open_model(path) as model:
        assert model["e"].nbytes == 1 << 42
        with pytest.raises(ModelFileError, match="expanded"):
            model["e"].numpy()
        assert bytes(model["e"].source.read_at(model["e"].offset + 4000, 8)) == bytes(8)


def test_a_dict_in_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    inner = tensor("0", 4, [4], [1])
    path.write_bytes(file(b"\x80\x02}q\x00" + text("w") + inner + b"s" + text("me") + b"h\x00s.", {"0": bytes(16)}))
    with open_model(path) as model:
        assert list(model) == ["w"]
        assert [f.code for f in model.findings] == ["cycle"]


def test_nesting_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for depth, good in ((torch_tree.MAX_DEPTH - 2, True), (torch_tree.MAX_DEPTH + 1, False)):
        path.write_bytes(file(b"\x80\x02" + (b"}" + text("k")) * depth + b"N" + b"s" * depth + b"."))
        if good:
            assert len(open_model(path).metadata) == 1
        else:
            with pytest.raises(ModelFileError, match="nested deeper"):
                open_model(path)


def rebuild(name: str, *args: bytes) -> bytes:
    return f"ctorch._utils\n{name}\n(".encode() + b"".join(args) + b"tR"


WRONG = {
    "storage not in the file": (tensor("9", 4, [4], [1]), "not in the file"),
    "storage too short": (tensor("0", 1000, [4], [1]), "size of 16 bytes"),
    "storage too long": (tensor("0", 2, [2], [1]), "size of 16 bytes"),
    "beyond the storage": (tensor("0", 4, [4], [1], 1), "which has 4"),
    "strides beyond the storage": (tensor("0", 4, [2, 2], [3, 1]), "which has 4"),
    "negative stride": (tensor("0", 4, [4], [-1]), "strides"),
    "negative size": (tensor("0", 4, [-4], [1]), "sizes"),
    "negative offset": (tensor("0", 4, [2], [1], -1), "offset"),
    "sizes and strides": (tensor("0", 4, [2, 2], [1]), "2 sizes and 1 strides"),
    "65 dimensions": (tensor("0", 4, [1] * 65, [1] * 65), "sizes"),
    "no arguments": (rebuild("_rebuild_tensor_v2"), "0 arguments"),
    "no storage": (rebuild("_rebuild_tensor_v2", b"N", integer(0), numbers([4]), numbers([1])), "no storage"),
    "text for a size": (rebuild("_rebuild_tensor_v2", storage("0", 4), integer(0), text("4"), numbers([1])), "sizes"),
    "absurd size": (tensor("0", 4, [1 << 40, 1 << 30], [0, 0]), "no file can hold"),
    "items of a tensor": (tensor("0", 4, [4], [1]) + text("k") + b"Ns", "SETITEM on a tensor"),
    "unknown storage type": (
        rebuild("_rebuild_tensor_v2", storage("0", 4, "StrangeStorage"), integer(0), numbers([4]), numbers([1])),
        "none of PyTorch's",
    ),
    "a scale that no float holds": (
        rebuild(
            "_rebuild_qtensor",
            storage("0", 16, "QInt8Storage"),
            integer(0),
            numbers([4]),
            numbers([1]),
            b"ctorch\nper_tensor_affine\n\x8a\xff" + b"\x7f" * 255 + b"K\x00\x87",
            b"\x89N",
        ),
        "missing or absurd",
    ),
    "quantized without a scheme": (
        rebuild("_rebuild_qtensor", storage("0", 16, "QInt8Storage"), integer(0), numbers([4]), numbers([1]), b")"),
        "does not say how",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_make_no_sense(what: str, tmp_path: Path) -> None:
    value, word = WRONG[what]
    path = tmp_path / "model.pt"
    path.write_bytes(file(state_dict(w=value), {"0": bytes(16)}))
    with pytest.raises(ModelFileError, match=word):
        open_model(path)


STATES = {
    "itself": (b"h\x05", None),
    "deep": (b"]" * 5000 + b"a" * 4999, "nested deeper"),
    "a dict of one hash": (
        b"}(" + b"".join(integer(i * ((1 << 61) - 1)) + b"N" for i in range(60_000)) + b"u",
        "one hash",
    ),
    "a set of one hash": (
        b"c__builtin__\nset\n(" + b"".join(integer(i * ((1 << 61) - 1)) for i in range(60_000)) + b"l\x85R",
        "one hash",
    ),
    "a set of laughs": (
        b"c__builtin__\nset\n]K\x01\x85q\x07" + b"0h\x07h\x07\x86q\x07" * 60 + b"a\x85R",
        None,
    ),
}


@pytest.mark.filterwarnings("ignore:.*plain data here")
@pytest.mark.parametrize("what", STATES)
def test_states_of_unknown_objects(what: str, tmp_path: Path) -> None:
    """What is built for `torch_load` beyond what a walk has seen is bounded as well."""
    state, word = STATES[what]
    path = tmp_path / "model.pt"
    path.write_bytes(file(state_dict(n=b"cargparse\nNamespace\n)\x81q\x05" + state + b"b")))
    expected = nullcontext() if word is None else pytest.raises(ModelFileError, match=word)
    with expected:
        assert torch_load(path)["n"].path == "argparse.Namespace"


def test_a_byte_changed_anywhere_never_crashes(tmp_path: Path) -> None:
    pickle = state_dict(w=tensor("0", 4, [2, 2], [1, 2]), n=integer(7), o=EMPTY_HOOKS)
    for i in range(len(pickle)):
        for bit in (0x01, 0x10, 0x80):
            changed = bytes([*pickle[:i], pickle[i] ^ bit, *pickle[i + 1 :]])
            path = tmp_path / "model.pt"
            path.write_bytes(file(changed, {"0": bytes(16)}))
            try:
                with open_model(path) as model:
                    str(model)
            except ModelFileError:
                continue
