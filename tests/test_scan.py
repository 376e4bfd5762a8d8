"""`scan` and `apsi model scan`: verdicts on attacks, on sound files, and on what cannot be read."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import apsi_inspect
from apsi_inspect import samples
from apsi_inspect.cli import main
from apsi_inspect.errors import ModelFileError
from apsi_inspect.ops.scan import scan

from . import handmade
from .torch_zip import Entry, archive, file, integer, state_dict, tensor, text

FOLDER = Path(__file__).parent / "data" / "cases"
CASES = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))["cases"]
ATTACKS = [c for c in CASES if c["action"] == "scan"]
SYSTEM = b"cos\nsystem\n" + text("x") + b"\x85R"
GOOD = file(state_dict(w=tensor("0", 4, [4], [1])), {"0": bytes(16)})
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
BREAKOUT = "{{ messages.__class__.__mro__[1].__subclasses__() }}"


def put(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("case", ATTACKS, ids=lambda c: c["id"])
def test_the_bank(case: dict[str, Any]) -> None:
    report = scan(FOLDER / case["entry"])
    assert report.verdict != case["expect"].get("verdict_not")
    if case["accept"] == ["rejects"]:
        assert report.verdict != "safe"
        with pytest.raises(ModelFileError):
            report.raise_if_failed()
    if report.verdict == "unsafe":
        said = json.dumps(report.to_dict())
        for words in case["expect"].get("error_mentions", []):
            assert any(w.lower() in said.lower() for w in words)


@pytest.mark.parametrize("name", samples.names())
def test_samples_are_safe(name: str, tmp_path: Path) -> None:
    (path,) = samples.write(tmp_path, [name])
    report = apsi_inspect.scan(path)
    assert report.verdict == "safe"
    assert report.complete
    assert report.ok
    assert report.raise_if_failed() is report


def test_reading_imports_no_scheduler_and_no_units(tmp_path: Path) -> None:
    """Among them tblib, which changes how every exception of the process is pickled."""
    paths = samples.write(tmp_path)
    code = (
        "import sys\nimport apsi_inspect as ai\nfor path in sys.argv[1:]:\n    ai.scan(path)\n    ai.open(path)\n"
        "print(sorted({'tblib', 'dask', 'distributed', 'pint', 'xarray'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


SOUND = {
    "archive": GOOD,
    "pickle": pickle.dumps({"a": [1, 2.5, "x", b"y", None, True, (1,), {2}]}),
    "pickle 0": pickle.dumps({"a": [1, 2.5, "x"]}, 0),
    "arrays": pickle.dumps({"a": np.arange(3)}),
    "json": b'{"hidden_size": 4}',
}


@pytest.mark.parametrize("what", SOUND)
def test_sound_files(what: str, tmp_path: Path) -> None:
    path = put(tmp_path, "model.json" if what == "json" else "model.pkl", SOUND[what])
    report = scan(path)
    assert report.verdict == "safe", report.findings
    assert report.coverage != "nothing"


UNKNOWN = {
    "empty": b"",
    "random": bytes(range(7, 90)),
    "cut archive": GOOD[:-20],
    "cut pickle": pickle.dumps({"a": [1] * 100})[:-3],
    "no member of ours": archive([Entry("readme.txt", b"hello")]),
    "two objects": archive([Entry("a/data.pkl", b"\x80\x02N."), Entry("b/data.pkl", b"\x80\x02N.")]),
    "unknown class": b"\x80\x02csome.package\nThing\n)R.",
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "elf": b"\x7fELF" + bytes(100),
    "library in an archive": archive([Entry("m/data.pkl", b"\x80\x02N."), Entry("m/x.so", b"\x7fELF" + bytes(9))]),
    "script": b"#!/bin/sh\nrm -r /\n",
    "setitem on a tensor": file(state_dict(w=tensor("0", 4, [4], [1]) + text("k") + b"Ns"), {"0": bytes(16)}),
    "encrypted": archive([Entry("m/data.pkl", b"\x80\x02N.", flags=1)]),
    "trailing": b"\x80\x02N." + bytes(100),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_judged_is_never_safe(what: str, tmp_path: Path) -> None:
    report = scan(put(tmp_path, "model.pt", UNKNOWN[what]))
    assert report.verdict == "unknown"
    assert report.findings
    assert not report.complete


UNSAFE = {
    "member of another name": archive(
        [Entry("m/data.pkl", b"\x80\x02N."), Entry("m/payload.dat", b"\x80\x02" + SYSTEM + b".")]
    ),
    "deflated member": archive([Entry("m/data.pkl", b"\x80\x02" + SYSTEM + b".", 8)]),
    "archive in an archive": archive([Entry("inner.pt", file(state_dict(a=SYSTEM)))]),
    "second pickle": b"\x80\x02N.\x80\x02" + SYSTEM + b".",
    "protocol 0": b"cos\nsystem\n(S'x'\ntR.",
    "before the end": b"\x80\x02" + SYSTEM + b"0",
    "never called": b"\x80\x02cos\nsystem\n0N.",
}


@pytest.mark.parametrize("what", UNSAFE)
def test_unsafe(what: str, tmp_path: Path) -> None:
    report = scan(put(tmp_path, "model.pkl", UNSAFE[what]))
    assert report.verdict == "unsafe"
    assert any(n.path == "os.system" and n.verdict == "dangerous" for n in report.globals)
    assert "os.system" in report.reason


def test_every_name_is_listed(tmp_path: Path) -> None:
    value = b"(csome.package\nThing\n)Rcargparse\nNamespace\n)R" + tensor("0", 4, [4], [1]) + b"t"
    report = scan(put(tmp_path, "m.pt", file(state_dict(a=value), {"0": bytes(16)})))
    assert {n.path: n.verdict for n in report.globals} == {
        "some.package.Thing": "unknown", "argparse.Namespace": "known", "torch._utils._rebuild_tensor_v2": "allowed",
        "torch.FloatStorage": "allowed", "collections.OrderedDict": "allowed",
    }  # fmt: skip
    assert report.globals[0].verdict == "unknown"  # worst first


@pytest.mark.parametrize("form", ["bytes", "base64", "hex"])
def test_a_pickle_in_a_string(form: str, tmp_path: Path) -> None:
    import base64

    inner = pickle.dumps(print)
    hidden = {"bytes": inner, "base64": base64.b64encode(inner).decode(), "hex": inner.hex()}[form]
    report = scan(put(tmp_path, "m.pkl", pickle.dumps({"config": hidden})))
    assert (report.verdict, report.findings[0].code) == ("unknown", "hidden-pickle")


def gguf(template: str, key: str = "tokenizer.chat_template") -> bytes:
    g = handmade.Gguf()
    return g.file([("general.architecture", "STRING", "llama"), (key, "STRING", template)], [])


@pytest.mark.parametrize(
    ("template", "verdict"),
    [
        (CHAT, "safe"),
        (BREAKOUT, "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{{ x|attr('__class__') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "unsafe"),
    ],
)
def test_chat_templates(template: str, verdict: str, tmp_path: Path) -> None:
    files = {
        "m.gguf": gguf(template),
        "tokenizer_config.json": json.dumps({"chat_template": template}),
        "list.json": json.dumps({"chat_template": [{"name": "default", "template": template}]}),
        "chat_template.jinja": template,
        "m.safetensors": handmade.safetensors([("w", "F32", [1], bytes(4))], {"chat_template": template}),
    }
    for name, data in files.items():
        report = scan(put(tmp_path, name, data))
        assert report.verdict == verdict, name
        wanted = "chat-template" if verdict == "safe" else "suspicious-template"
        assert [f.code for f in report.findings] == [wanted]
        (tmp_path / name).unlink()


def test_code_in_metadata_and_code_to_be_run(tmp_path: Path) -> None:
    report = scan(put(tmp_path, "m.safetensors", handmade.safetensors([], {"info": "import os; os.system('x')"})))
    assert (report.verdict, report.findings[0].code) == ("unknown", "suspicious-text")
    report = scan(put(tmp_path, "config.json", json.dumps({"auto_map": {"AutoModel": "modeling.Mine"}})))
    assert (report.verdict, report.findings[0].code) == ("unknown", "remote-code")
    report = scan(put(tmp_path, "modeling.py", "print('hello')"))
    assert (report.verdict, report.findings[0].code) == ("unknown", "program")


def test_onnx_operators_of_somebody(tmp_path: Path) -> None:
    for domain, verdict in (("", "safe"), ("ai.onnx.contrib", "unknown")):
        graph = helper.make_graph([helper.make_node("PyOp", ["x"], ["y"], domain=domain)], "g", [], [])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, 1)])
        onnx.save_model(model, tmp_path / "m.onnx")
        assert scan(tmp_path / "m.onnx").verdict == verdict


def test_a_folder_is_as_good_as_its_worst_file(tmp_path: Path) -> None:
    put(tmp_path, "a.pt", GOOD)
    put(tmp_path, "config.json", "{}")
    assert scan(tmp_path).verdict == "safe"
    (tmp_path / "inner").mkdir()
    put(tmp_path / "inner", "b.bin", file(state_dict(a=SYSTEM)))
    report = scan(tmp_path)
    assert report.verdict == "unsafe"
    assert "inner/b.bin" in report.reason


def test_the_report_is_frozen_and_shown(tmp_path: Path) -> None:
    name = b"\x80\x04\x8c\x02os\x8c\x22<script>alert(1)</script>\x1b[31m\xe2\x80\xaex\x93."
    report = scan(put(tmp_path, "m.pkl", name))
    with pytest.raises(AttributeError):
        report.verdict = "safe"
    html, shown = report._repr_html_(), str(report)
    assert shown.splitlines()[0].endswith("  ✗ unsafe")  # a word of its own: verify's are about bytes, not about code
    assert not {"intact", "damaged", "not-checked"} & set(shown.replace(":", " ").split())
    assert "<script" not in html
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "unsafe" in html
    assert "unsafe" in shown


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = str(put(tmp_path, "good.pt", GOOD)), str(put(tmp_path, "bad.pt", file(state_dict(a=SYSTEM))))
    odd = str(put(tmp_path, "odd.bin", b"\x01\x02\x03"))
    assert main(["model", "scan", good]) == 0
    assert "safe" in capsys.readouterr().out
    assert main(["model", "scan", good, bad]) == 1
    out = capsys.readouterr().out
    assert "os.system" in out
    assert "unsafe" in out
    assert main(["model", "scan", odd]) == 1
    assert "unknown" in capsys.readouterr().out
    assert main(["model", "scan", str(tmp_path / "missing"), good]) == 3
    assert "No such file" in capsys.readouterr().err
    assert main(["model", "scan", "--json", good, bad]) == 1
    documents = json.loads(capsys.readouterr().out)
    assert [d["verdict"] for d in documents] == ["safe", "unsafe"]
    assert documents[1]["schema_version"] == 1
    asked = documents[1]["globals"][0]
    assert asked == {"path": "os.system", "count": 1, "verdict": "dangerous", "where": "m/data.pkl"}
    assert main(["model", "scan", "--json", good]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_integers_are_no_code(tmp_path: Path) -> None:
    assert scan(put(tmp_path, "m.pt", file(state_dict(a=integer(1 << 100))))).verdict == "safe"


def test_what_the_reader_refuses_is_never_safe(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").write_bytes(b"")
    laughs = b"\x80\x02]q\x00" + b"".join(b"(h%ch%clq%c" % (i, i, i + 1) for i in range(200)) + b"."
    (tmp_path / "laughs.pkl").write_bytes(laughs)
    (tmp_path / "within.pkl").write_bytes(b"\x80\x04\x8c\x05numpy\x8c\x11testing.os.getcwd\x93)R.")
    (tmp_path / "touch.pkl").write_bytes(b"\x80\x04\x8c\x07pathlib\x8c\x0aPath.touch\x93)R.")
    verdicts = {p.name: scan(p).verdict for p in tmp_path.iterdir()}
    assert verdicts == {
        "empty.pt": "unknown",
        "laughs.pkl": "unknown",
        "within.pkl": "unsafe",
        "touch.pkl": "unsafe",
    }


CALL = b"\x8c\x02os\x8c\x06system\x93\x8c\x05touch\x85R."


@pytest.mark.parametrize("begin", [b"", b"N0", b"K\x010"])
@pytest.mark.parametrize("ending", ["txt", "md", "yaml"])
def test_a_pickle_called_a_text(begin: bytes, ending: str, tmp_path: Path) -> None:
    assert scan(put(tmp_path, f"m.{ending}", begin + CALL)).verdict == "unsafe"
    assert scan(put(tmp_path, f"n.{ending}", b"(S''\n0cos\nsystem\n(S'ls'\ntR.")).verdict == "unsafe"
    assert scan(put(tmp_path, f"o.{ending}", b"\xff\xfe\x00 bytes")).verdict == "unknown"
    assert scan(put(tmp_path, f"p.{ending}", "a text, déjà vu\n".encode())).verdict == "safe"


def test_an_archive_of_torch_package(tmp_path: Path) -> None:
    """Its loader takes even `collections` from the archive."""
    entries = [
        Entry("a/model/model.pkl", b"\x80\x02ccollections\nOrderedDict\n)R."),
        Entry("a/collections.py", b"import os\n"),
        Entry("a/.data/extern_modules", b""),
    ]
    report = scan(put(tmp_path, "m.pt", archive(entries)))
    assert report.verdict == "unknown"
    assert {f.code for f in report.findings} == {"program", "not-read"}


@pytest.mark.parametrize("length", [0x180, 0x280, 0x480, 0x4B50, 0x7B7B])
def test_safetensors_whose_length_looks_like_another_format(length: int, tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(length)
    path = put(tmp_path, "m.safetensors", length.to_bytes(8, "little") + header + bytes(4))
    assert scan(path).verdict == "safe"


def test_a_pickle_that_looks_like_safetensors(tmp_path: Path) -> None:
    """A float takes the rest of the length and the bracket; what follows runs code."""
    length = 0x470280
    both = length.to_bytes(8, "little") + b"{" + b"xx0cos\nsystem\n(S'ls'\ntR." + bytes(length)
    assert scan(put(tmp_path, "m.safetensors", both)).verdict == "unsafe"


def test_torchscript_classes_are_known_only_in_torchscript(tmp_path: Path) -> None:
    pickled = b"\x80\x02c__torch__.net\nNet\n)\x81."
    assert scan(put(tmp_path, "plain.pt", file(pickled))).verdict == "unknown"
    assert scan(put(tmp_path, "m.pkl", pickled)).verdict == "unknown"
    entries = [Entry("m/data.pkl", pickled), Entry("m/constants.pkl", b"\x80\x02)."), Entry("m/version", b"3")]
    report = scan(put(tmp_path, "script.pt", archive(entries)))
    assert {n.path: n.verdict for n in report.globals} == {"__torch__.net.Net": "known"}
