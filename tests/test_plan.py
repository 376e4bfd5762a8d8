"""`plan`: sizes against the files, errors against NumPy and the gguf package, plans against one format for all."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pandas as pd
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.numpy import load_file, save_file

import apsi_inspect as ai
from apsi_inspect.cli import main
from apsi_inspect.errors import ModelFileError, ValueRefusedError
from apsi_inspect.ops.error import quant_error
from apsi_inspect.ops.plan import plan
from apsi_inspect.ops.plan_report import Plan
from apsi_inspect.parts import to_html, to_text

from .html_page import Page
from .test_imatrix import write as write_imatrix

REAL = ai.samples.path("fracast.safetensors")
FORMATS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def approximated(x: np.ndarray, fmt: str) -> np.ndarray:
    """The values that a format keeps, by the gguf package and NumPy."""
    if fmt == "f16":
        return x.astype(np.float16).astype(np.float64)
    kind = GGMLQuantizationType[fmt.upper()]
    return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind).astype(np.float64)


def measured(
    tensors: dict[str, np.ndarray],
    formats: tuple[str, ...] = (*FORMATS, "f16"),
    weights: dict[str, np.ndarray] | None = None,
) -> Any:
    """What `quant_error` gives, by the gguf package and NumPy."""
    rows = []
    for name, x in tensors.items():
        for fmt in formats if x.ndim > 1 else ():
            if fmt != "f16" and x.shape[-1] % 32:
                continue
            squares = (x.astype(np.float64) - approximated(x, fmt)) ** 2
            w = (weights or {}).get(name)
            weighted = np.nan if w is None else float(np.average(squares, weights=np.broadcast_to(w, x.shape)))
            sqnr = 10 * np.log10((x.astype(np.float64) ** 2).sum() / squares.sum()) if squares.any() else inf
            rows.append((name, fmt, x.size, float(squares.mean()), weighted, sqnr))
    columns = ["name", "format", "numel", "mse", "weighted_mse", "sqnr_db"]
    return SimpleNamespace(frame=pd.DataFrame(rows, columns=columns), sampled=None)


@pytest.fixture(scope="module")
def real() -> dict[str, np.ndarray]:
    return load_file(REAL)


@pytest.fixture(scope="module")
def errors(real: dict[str, np.ndarray]) -> Any:
    return measured(real)


def total_error(tensors: dict[str, np.ndarray], path: Path) -> float:
    """Sum of the squared errors of a GGUF file, by the gguf package."""
    out = 0.0
    for t in GGUFReader(path).tensors:
        x = tensors[t.name].astype(np.float64)
        out += float(
            ((gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64).reshape(x.shape) - x) ** 2).sum()
        )
    return out


def test_sizes_and_errors_are_those_of_the_file(real: dict[str, np.ndarray], errors: Any, tmp_path: Path) -> None:
    dst = tmp_path / "m.gguf"
    for bpw in (6.8, 7.4, 8.4, 10.0):
        p = plan(REAL, bpw=bpw, formats=FORMATS, errors=errors)
        assert p.nbytes <= p.target == int(bpw * sum(x.size for x in real.values()) / 8)
        size = p.file_size(dst)
        ai.convert(REAL, dst, plan=p, force=True)
        stored = {t.name: t for t in GGUFReader(dst).tensors}
        assert p.nbytes == sum(t.n_bytes for t in stored.values())
        assert size == dst.stat().st_size
        for row in p.rows:
            assert stored[row.name].tensor_type.name == row.chosen
            assert stored[row.name].n_bytes == row.nbytes
        assert p.error == pytest.approx(total_error(real, dst), rel=1e-5)


def test_never_above_one_format_for_all(real: dict[str, np.ndarray], errors: Any, tmp_path: Path) -> None:
    dst = tmp_path / "m.gguf"
    for fmt in FORMATS:
        ai.convert(REAL, dst, fmt, force=True)
        limit = sum(t.n_bytes for t in GGUFReader(dst).tensors)
        p = plan(REAL, limit, formats=FORMATS, errors=errors)
        (one,) = [u for u in p.uniform if u.format == fmt]
        assert (one.nbytes, one.fits) == (limit, True)
        assert one.error == pytest.approx(total_error(real, dst), rel=1e-5)
        assert p.nbytes <= limit
        assert p.error <= min(u.error for u in p.uniform if u.fits)
        assert p.optimal


def test_deterministic_and_monotonic(errors: Any) -> None:
    plans = [plan(REAL, bpw=bpw, formats=FORMATS, errors=errors) for bpw in np.linspace(6.8, 10, 12)]
    assert plans == [plan(REAL, bpw=bpw, formats=list(FORMATS), errors=errors) for bpw in np.linspace(6.8, 10, 12)]
    totals = [p.error for p in plans]
    assert totals == sorted(totals, reverse=True)


def test_a_size_as_text_or_number(errors: Any) -> None:
    p = plan(REAL, "80 KiB", formats=FORMATS, errors=errors)
    assert p.target == 80 * 1024
    assert p.rows == plan(REAL, 80 * 1024, formats="q8_0, q5_1 q5_0,q4_1,q4_0", errors=errors).rows


def test_out_of_reach(errors: Any) -> None:
    with pytest.raises(
        ValueRefusedError, match=r"1000 bytes are below the smallest possible size: (\d+) to (\d+)"
    ) as e:
        plan(REAL, 1000, formats=FORMATS, errors=errors)
    low, high = map(int, re.findall(r"(\d+) to (\d+) bytes", str(e.value))[0])
    least, most = (plan(REAL, n, formats=FORMATS, errors=errors) for n in (low, high))
    assert (least.nbytes, most.nbytes) == (low, high) == (least.smallest, least.largest)


def test_a_target_that_nothing_is_large_enough_for(real: dict[str, np.ndarray], errors: Any, tmp_path: Path) -> None:
    p = plan(REAL, "1GB", formats=FORMATS, errors=errors)
    assert (p.target, p.reached, p.optimal) == (10**9, False, True)
    shown = " ".join(str(p).split())
    assert "target 953.7 MiB (not reached)" in shown
    assert "the target is not reached: every tensor has its most exact encoding of these formats" in shown
    for r in p.rows:
        x = real[r.name]
        even = x.ndim > 1 and x.shape[-1] % 32 == 0
        found = {f: float(((x - approximated(x, f)) ** 2).sum()) for f in FORMATS} if even else {r.chosen.lower(): 0.0}
        assert found[r.chosen.lower()] == min(found.values())
    exact = plan(REAL, p.nbytes, formats=FORMATS, errors=errors)
    assert (exact.reached, exact.rows, exact.nbytes) == (True, p.rows, p.largest)
    assert "bytes are left" in str(exact)
    assert "not reached" not in str(exact)
    assert plan(REAL, bpw=1000, formats=FORMATS, errors=errors).rows == p.rows
    assert plan(REAL, 2**63 - 1, formats=FORMATS, errors=errors).rows == p.rows
    assert plan(REAL, np.int64(p.nbytes), formats=FORMATS, errors=errors) == exact
    again = Plan.load(p.save(tmp_path / "p.json"))
    assert (again, again.reached) == (p, False)
    assert (p.to_dict()["reached"], exact.to_dict()["reached"]) == (False, True)


def test_models_without_values(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors")
    with pytest.raises(ValueRefusedError, match=r"none\.safetensors has no tensors to plan for"):
        plan(tmp_path / "none.safetensors", bpw=6)
    save_file({"z": np.zeros((0, 64), np.float32)}, tmp_path / "zero.safetensors")
    p = plan(tmp_path / "zero.safetensors", bpw=6)
    assert (p.nbytes, p.error) == (0, 0)
    assert "SQNR –" in str(p)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either a target"),
        ({"target": 70_000, "bpw": 4}, "give either a target"),
        ({"bpw": 0}, "bpw is 0"),
        ({"bpw": inf}, "bpw is inf"),
        ({"bpw": nan}, "bpw is nan"),
        ({"bpw": 10**400}, "bpw is 1000"),
        ({"bpw": "4.5"}, "bpw is '4.5'"),
        ({"target": 2**63}, "a size of 2.63 bytes or more was given"),
        ({"target": 10**5000}, "a size of 2.63 bytes or more was given"),
        ({"target": "9" * 400 + "GB"}, "a size of 2.63 bytes or more was given"),
        ({"target": -1}, "size -1 is not like"),
        ({"target": "0.1"}, "size '0.1' is not like"),
        ({"target": 4.5}, "size 4.5 is not like"),
        ({"target": "70 apples"}, "size '70 apples' is not like"),
        ({"bpw": 7, "formats": []}, "formats is empty"),
        ({"bpw": 7, "formats": ["q9_9"]}, "'q9_9' cannot be written to gguf"),
        ({"bpw": 7, "container": "onnx"}, "container 'onnx' is none of"),
        ({"bpw": 7, "container": "safetensors"}, "formats are needed for safetensors"),
        ({"bpw": 7, "keep": {"nothing.*": None}}, "keep rule 'nothing.*' matches no tensor name"),
        ({"bpw": 7, "keep": ["=q8_0"]}, "is neither PATTERN=TYPE nor PATTERN"),
        ({"bpw": 7, "keep": "head.*=q8_0"}, "a list or a dict of rules was expected"),
        ({"bpw": 7, "keep": 3}, "keep is int; a list or a dict of rules"),
        ({"bpw": 7, "keep": [3]}, "keep has 3; a rule is a text"),
        ({"bpw": 7, "keep": {3: None}}, "keep has the key 3"),
        ({"bpw": 7, "formats": 4}, "formats is int; words like"),
        ({"bpw": 7, "errors": 4}, "errors is int; what quant_error returns"),
        ({"bpw": 7, "keep": {"core.in_proj.weight": "q8_0"}}, "Q8_0 was asked for, but rows of 7 are no multiple"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueRefusedError, match=message):
        plan(REAL, **arguments)


def test_errors_of_another_model_are_refused(real: dict[str, np.ndarray], tmp_path: Path) -> None:
    save_file({"a": np.ones((32, 32), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueRefusedError, match="the errors are of another model: tensor"):
        plan(tmp_path / "other.safetensors", bpw=5, formats=FORMATS, errors=measured(real))


def test_rules_and_fallbacks(errors: Any, tmp_path: Path) -> None:
    keep = {"core.*": "q8_0", "core.in_proj*": None, "core.*bias": None, "core.*norm*": None, "core.scale*": None}
    keep |= {"core.periodic*": None, "core.block.dw_*": None}
    p = plan(REAL, bpw=9, formats=FORMATS, errors=errors, keep=keep)
    by_name = {r.name: r for r in p.rows}
    assert by_name["core.block.pw.weight"].chosen == "Q8_0"
    assert by_name["core.in_proj.weight"].chosen == "F32"
    assert by_name["core.in_proj.weight"].reason == "rule core.in_proj*: as it is"
    assert (by_name["core.in_proj.weight"].error, by_name["core.in_proj.weight"].sqnr_db) == (0, inf)
    assert by_name["head.summary_proj.weight"].chosen == "F16"
    assert by_name["head.summary_proj.weight"].reason == "rows of 133 are no multiple of the 32"
    assert by_name["head.out_proj.bias"].reason == "it is 1-D; runtimes need those in F32"
    assert by_name["head.out_proj.weight"].reason == ""
    assert {r.name for r in p.fallbacks} >= {"head.summary_proj.weight", "core.in_proj.weight", "head.out_proj.bias"}
    listed = plan(
        REAL, bpw=9, formats=FORMATS, errors=errors, keep=[k if v is None else f"{k}={v}" for k, v in keep.items()]
    )
    assert listed == p
    assert p.rules[:2] == ("core.*=q8_0", "core.in_proj*")


def test_some_formats_do_not_fit(real: dict[str, np.ndarray], errors: Any) -> None:
    p = plan(REAL, bpw=13, formats=["q8_0", "f16"], errors=errors)
    assert {r.chosen for r in p.rows if r.name == "core.in_proj.weight"} == {"F16"}
    p = plan(REAL, bpw=17, formats=["q4_0", "f32"], errors=errors)
    row = next(r for r in p.rows if r.name == "core.in_proj.weight")
    assert row.reason == "q4_0: rows of 7 are no multiple of the 32, F16 instead"
    assert row.options == 2


def test_the_gain_of_the_last_step(real: dict[str, np.ndarray], errors: Any) -> None:
    p = plan(REAL, bpw=8, formats=["q8_0", "q4_0"], errors=errors)
    assert {r.chosen for r in p.rows if r.options > 1} == {"Q8_0", "Q4_0"}
    for r in p.rows:
        if r.options == 1 or r.chosen == "Q4_0":
            assert r.marginal_gain is None
        else:
            e8, e4 = (((real[r.name] - approximated(real[r.name], f)) ** 2).sum() for f in ("q8_0", "q4_0"))
            assert r.marginal_gain == pytest.approx((e4 - e8) / (r.numel * 4 / 8), rel=1e-5)
    gained = [r.marginal_gain for r in p.rows if r.marginal_gain is not None]
    assert min(gained) > 0


def test_frame(errors: Any) -> None:
    p = plan(REAL, bpw=8, formats=FORMATS, errors=errors)
    frame = p.frame
    assert list(frame.columns)[:6] == ["name", "shape", "from", "chosen", "numel", "error"]
    assert frame["nbytes"].sum() == p.nbytes
    assert frame["error"].sum() == pytest.approx(p.error)
    assert p.bpw == pytest.approx(8 * frame["nbytes"].sum() / frame["numel"].sum())
    assert set(frame["from"]) == {"F32"}


def test_sqnr(real: dict[str, np.ndarray], errors: Any) -> None:
    p = plan(REAL, bpw=8, formats=["q8_0", "q4_0"], errors=errors)
    seen = [r for r in p.rows if r.error]
    signal = sum(float((real[r.name].astype(np.float64) ** 2).sum()) for r in seen)
    assert p.sqnr_db == pytest.approx(10 * np.log10(signal / p.error), abs=1e-4)


def test_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors = {f"blk.{i}.w.weight": rng.standard_normal((16, 64)).astype(np.float32) for i in range(4)}
    tensors["output.weight"] = rng.standard_normal((8, 64)).astype(np.float32)
    save_file(tensors, tmp_path / "m.safetensors")
    importance = {n: (rng.random(64) ** 4 * 10 ** (2 * i)).astype(np.float32) for i, n in enumerate(tensors) if i < 4}
    matrix = write_imatrix(tmp_path / "i.gguf", {n: (w[None] * 3, np.array([3])) for n, w in importance.items()})
    table = measured(tensors, weights=importance)
    p = plan(tmp_path / "m.safetensors", bpw=6, formats=["q8_0", "q4_0"], errors=table, weights=matrix)
    assert p.weights == str(matrix)
    mean = np.mean([w.mean(dtype=np.float64) for w in importance.values()])
    for r in p.rows:
        x = tensors[r.name]
        squares = (x.astype(np.float64) - approximated(x, r.chosen.lower())) ** 2
        w = importance.get(r.name, np.full(64, mean))
        assert r.error == pytest.approx((squares * w).sum(), rel=1e-5)
        assert r.squares == pytest.approx(squares.sum(), rel=1e-5)
    assert [r.chosen for r in p.rows if r.name in ("blk.2.w.weight", "blk.3.w.weight")] == ["Q4_0", "Q8_0"]
    other = write_imatrix(tmp_path / "o.gguf", {"x": (np.ones((1, 64), np.float32), np.array([3]))})
    with pytest.raises(ValueRefusedError, match="has no weights for any tensor of the model"):
        plan(tmp_path / "m.safetensors", bpw=6, formats=["q8_0", "q4_0"], errors=table, weights=other)


def test_a_quantized_model_may_stay_as_it_is(real: dict[str, np.ndarray], tmp_path: Path) -> None:
    src = tmp_path / "q.gguf"
    ai.convert(REAL, src, "q4_1")
    reader = {t.name: t for t in GGUFReader(src).tensors}
    values = {n: gguf.quants.dequantize(t.data, t.tensor_type).reshape(real[n].shape) for n, t in reader.items()}
    table = measured(values)
    whole = sum(t.n_bytes for t in reader.values())
    for target in (whole, whole + 1):
        p = plan(src, target, formats=FORMATS, errors=table)
        assert (p.error, p.nbytes, p.reached) == (0, whole, target == whole)
    assert "SQNR infinite" in str(p)
    p = plan(src, whole - 1000, formats=FORMATS, errors=table)
    assert {"Q4_0", "Q4_1"} <= {r.chosen for r in p.rows}
    dst = tmp_path / "p.gguf"
    report = ai.convert(src, dst, plan=p)
    assert sum(t.n_bytes for t in GGUFReader(dst).tensors) == p.nbytes
    kept = {r.name for r in p.rows if r.chosen == r.source}
    assert {t.name for t in report.of("kept")} == kept


def test_save_and_load(errors: Any, tmp_path: Path) -> None:
    p = plan(REAL, bpw=8, formats=FORMATS, errors=errors, keep=["head.queries"])
    path = p.save(tmp_path / "plan.json")
    assert Plan.load(path) == p
    assert path == str(tmp_path / "plan.json")
    document = json.loads(Path(path).read_text())
    assert document == p.to_dict()
    assert (document["schema_version"], document["nbytes"]) == (1, p.nbytes)
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    ai.convert(REAL, first, plan=p)
    ai.convert(REAL, second, plan=path)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("kind"), "is no plan: its kind is not"),
        (lambda d: d.update(schema_version=2), "is a plan of version 2; this reads 1"),
        (lambda d: d.pop("rows"), "the plan: rows is missing; list expected"),
        (lambda d: d.update(target=True), "the plan: target is True; int expected"),
        (lambda d: d.update(target=-1), "the plan: target is -1; a number of at least 0 expected"),
        (lambda d: d["rows"][2].update(error="much"), "row 3: error is much; int or float expected"),
        (lambda d: d["rows"][2].update(shape=[-1]), r"row 3: shape is \[-1\]"),
        (lambda d: d["rows"].append(d["rows"][0]), "has a tensor twice"),
        (lambda d: d["rows"].__setitem__(0, 5), "row 1: is no record"),
        (lambda d: d.update(rules=[1]), "rules: holds something that is no text"),
        (lambda d: d.update(bound=10**400), "bound is 1000"),
    ],
)
def test_a_bad_plan_file_is_one_error(errors: Any, tmp_path: Path, change: Any, message: str) -> None:
    document = plan(REAL, bpw=8, formats=FORMATS, errors=errors).to_dict()
    change(document)
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(ModelFileError, match=message):
        Plan.load(tmp_path / "p.json")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"kind": NaN}'])
def test_what_is_no_plan_is_one_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(ModelFileError):
        Plan.load(tmp_path / "p.json")


def test_a_plan_for_something_else_writes_nothing(real: dict[str, np.ndarray], errors: Any, tmp_path: Path) -> None:
    p = plan(REAL, bpw=8, formats=FORMATS, errors=errors)
    less = {n: x for n, x in real.items() if n != "head.queries"}
    save_file(less, tmp_path / "less.safetensors")
    save_file({**real, "more": np.ones(3, np.float32)}, tmp_path / "more.safetensors")
    save_file({**real, "head.queries": np.ones((64, 48), np.float32)}, tmp_path / "turned.safetensors")
    dst = tmp_path / "m.gguf"
    for name, message in (
        ("less", "this one does not have tensor 'head.queries'"),
        ("more", "it does not have tensor 'more'"),
        ("turned", r"'head.queries' has shape \(64, 48\), \(48, 64\) is planned"),
    ):
        with pytest.raises(ValueRefusedError, match=f"the plan is for another model: .*{message}"):
            ai.convert(tmp_path / f"{name}.safetensors", dst, plan=p)
    with pytest.raises(ValueRefusedError, match="the plan is for gguf, not for apsim"):
        ai.convert(REAL, tmp_path / "m.apsim", plan=p)
    for more in ({"dtype": "q8_0"}, {"tensor_types": ["head.*=q8_0"]}, {"block": 32}):
        with pytest.raises(ValueRefusedError, match="a plan says the encoding of every tensor"):
            ai.convert(REAL, dst, plan=p, **more)  # type: ignore[arg-type]
    with pytest.raises(ValueRefusedError, match="plan is int"):
        ai.convert(REAL, dst, plan=5)  # type: ignore[arg-type]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["less.safetensors", "more.safetensors", "turned.safetensors"]


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("n", "F32", "tensor 'n' is I64, 'F32' is planned"),
        ("w", "I64", "dtype 'I64' cannot be written to gguf"),
        ("w", "nothing", "dtype 'nothing' cannot be written to gguf"),
        ("b", "Q8_0", "tensor 'b': Q8_0 was asked for, but it is 1-D"),
    ],
)
def test_a_plan_that_somebody_changed(tmp_path: Path, name: str, chosen: str, message: str) -> None:
    tensors = {"w": np.eye(32, dtype=np.float32), "b": np.ones(32, np.float32), "n": np.arange(3)}
    src, path = tmp_path / "m.safetensors", tmp_path / "p.json"
    save_file(tensors, src)
    plan(src, 728, formats=["q8_0", "q4_0"], errors=measured({"w": tensors["w"]})).save(path)
    document = json.loads(path.read_text())
    next(r for r in document["rows"] if r["name"] == name)["chosen"] = chosen
    path.write_text(json.dumps(document))
    with pytest.raises(ValueRefusedError, match=message):
        ai.convert(src, tmp_path / "m.gguf", plan=path)
    assert not (tmp_path / "m.gguf").exists()


def test_text_and_html_say_the_same(errors: Any) -> None:
    p = plan(REAL, bpw=8, formats=FORMATS, errors=errors, keep=["head.queries"])
    text, page = to_text(p._parts()), Page(to_html(p._parts()))
    for fact in (str(p.nbytes), "core.block.pw.weight", "gain per byte", "q4_0", "rule head.queries: as it is", "dB"):
        assert fact in text
        assert fact in page.text
    assert "no choice of these formats within the target has a smaller error" in text
    assert repr(p).startswith("<Plan for ")


def applied(arguments: list[str], name: str) -> str | None:
    """The type that llama-quantize gives: the first pattern that is found in the name."""
    for option, rule in pairwise(arguments):
        if option == "--tensor-type" and re.search(rule.partition("=")[0].lower(), name):
            return rule.partition("=")[2]
    return None


def test_llama_quantize(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        f"blk.{i}.{n}.weight": rng.standard_normal((32, 64)) * 3.0 ** (i % 5 + len(n) % 2)
        for i in range(12)
        for n in ("attn_k", "ffn_up", "attn_q")
    }
    tensors |= {"token_embd.weight": rng.standard_normal((128, 64)), "blk.0.attn_norm.weight": np.ones(64)}
    floats = {n: x.astype(np.float32) for n, x in tensors.items()}
    save_file(floats, tmp_path / "m.safetensors")
    src = tmp_path / "m.gguf"
    ai.convert(tmp_path / "m.safetensors", src, architecture="llama")
    p = plan(src, bpw=6, formats=FORMATS, errors=measured(floats))
    arguments = p.to_llama_quantize("out.gguf")
    assert arguments[-3:-1] == [str(src), "out.gguf"]
    assert arguments[-1] in {r.chosen for r in p.rows}
    assert len({r.chosen for r in p.rows}) > 2
    rules = [a for a in arguments if "=" in a]
    backwards = [word for rule in reversed(rules) for word in ("--tensor-type", rule)]
    for r in p.rows:
        if len(r.shape) > 1:
            assert applied(arguments, r.name) == r.chosen.lower()
            assert applied(backwards, r.name) == r.chosen.lower()  # the last match is no other
    assert len(rules) < len(p.rows) / 2
    assert any(re.match(r"\^token_embd\\.weight\$=", r) for r in rules)
    assert "--allow-requantize" not in arguments
    with pytest.raises(ValueRefusedError, match="takes a GGUF model to GGUF"):
        plan(REAL, bpw=9, formats=FORMATS, errors=measured(load_file(REAL))).to_llama_quantize()


def test_measured_here_as_by_gguf(errors: Any) -> None:
    for bpw in (7, 8, 9):
        here, theirs = plan(REAL, bpw=bpw, formats=FORMATS), plan(REAL, bpw=bpw, formats=FORMATS, errors=errors)
        assert [r.chosen for r in here.rows] == [r.chosen for r in theirs.rows]
        assert here.error == pytest.approx(theirs.error, rel=1e-5)
    table = quant_error(REAL, FORMATS)
    assert plan(REAL, bpw=8, formats=FORMATS, errors=table).error == pytest.approx(
        plan(REAL, bpw=8, formats=FORMATS).error
    )


def test_every_default_format_of_a_language_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tensors = {
        f"blk.{i}.{n}.weight": (rng.standard_normal(s) * 1.7 ** (i % 4) * rng.random(s[-1])).astype(np.float32)
        for i in range(4)
        for n, s in (("attn_q", (64, 256)), ("ffn_up", (192, 256)), ("ffn_down", (256, 512)))
    }
    tensors["token_embd.weight"] = rng.standard_normal((500, 256)).astype(np.float32)
    tensors["output_norm.weight"] = np.ones(256, np.float32)
    save_file(tensors, tmp_path / "m.safetensors")
    src, dst = tmp_path / "m.gguf", tmp_path / "q.gguf"
    ai.convert(tmp_path / "m.safetensors", src, architecture="llama")
    table = quant_error(src, ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k"))
    for fmt in ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k"):
        ai.convert(src, dst, fmt, force=True)
        limit = sum(t.n_bytes for t in GGUFReader(dst).tensors)
        uniform = total_error(tensors, dst)
        p = plan(src, limit, errors=table)
        assert p.formats == ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k")
        size = p.file_size(dst)
        report = ai.convert(src, dst, plan=p, force=True)
        assert report.size_after == size == dst.stat().st_size
        assert sum(t.n_bytes for t in GGUFReader(dst).tensors) == p.nbytes <= limit
        found = total_error(tensors, dst)
        assert found == pytest.approx(p.error, rel=1e-5)
        assert found <= uniform * (1 + 1e-6)
        assert p.optimal


def test_apsim(real: dict[str, np.ndarray], tmp_path: Path) -> None:
    dst = tmp_path / "m.apsim"
    for bpw in (6, 7.5, 9):
        p = plan(REAL, bpw=bpw, container="apsim")
        assert p.formats == ("int8", "fp8", "fp6", "int4", "fp4")
        size = p.file_size(dst)
        ai.convert(REAL, dst, plan=p, force=True)
        with ai.open(dst) as m:
            assert {n: (m[n].encoding, m[n].nbytes) for n in m} == {r.name: (r.chosen, r.nbytes) for r in p.rows}
            values = {n: m[n].numpy().astype(np.float64) for n in m}
        assert size == dst.stat().st_size
        assert p.error == pytest.approx(sum(float(((values[n] - x) ** 2).sum()) for n, x in real.items()), rel=1e-5)
    again = plan(dst, p.nbytes - 2000)  # an .apsim model is planned for .apsim
    assert again.container == "apsim"
    ai.convert(dst, tmp_path / "n.apsim", plan=again)
    with ai.open(tmp_path / "n.apsim") as m:
        assert sum(m[n].nbytes for n in m) == again.nbytes


def test_safetensors(real: dict[str, np.ndarray], tmp_path: Path) -> None:
    p = plan(REAL, bpw=12, container="safetensors", formats=["f8_e4m3", "bf16", "f16"])
    dst = tmp_path / "m.safetensors"
    size = p.file_size(dst)
    ai.convert(REAL, dst, plan=p)
    assert size == dst.stat().st_size
    with ai.open(dst) as m:
        assert sum(m[n].nbytes for n in m) == p.nbytes


def test_an_importance_matrix_is_measured(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    tensors = {f"blk.{i}.w.weight": rng.standard_normal((3, 16, 64)).astype(np.float32) for i in range(2)}
    tensors["output.weight"] = rng.standard_normal((8, 64)).astype(np.float32)
    save_file(tensors, tmp_path / "m.safetensors")
    sums = {n: (rng.random((3, 64)) ** 4).astype(np.float32) for n in ("blk.0.w.weight", "blk.1.w.weight")}
    matrix = write_imatrix(tmp_path / "i.gguf", {n: (w, np.array([2, 4, 8])) for n, w in sums.items()})
    p = plan(tmp_path / "m.safetensors", bpw=6, formats=["q8_0", "q4_0"], weights=matrix)
    means = {n: w / np.float32([[2], [4], [8]]) for n, w in sums.items()}
    mean = np.mean([w.mean(dtype=np.float64) for w in means.values()])
    for r in p.rows:
        x = tensors[r.name]
        w = means[r.name][:, None, :] if r.name in means else mean
        squares = (x.astype(np.float64) - approximated(x, r.chosen.lower())) ** 2
        assert r.error == pytest.approx((squares * w).sum(), rel=1e-5)


def test_values_that_no_format_holds(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    tensors = {name: rng.standard_normal((4, 32)).astype(np.float32) for name in ("a.weight", "b.weight")}
    tensors["a.weight"][1, 1] = np.nan
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ValueRefusedError, match=r"tensor 'a\.weight': no format here can hold its values"):
        plan(tmp_path / "m.safetensors", bpw=6, formats=["q8_0", "q4_0"])
    p = plan(tmp_path / "m.safetensors", bpw=20.25, formats=["q8_0", "q4_0"], keep=["a.weight"])
    assert [r.chosen for r in p.rows] == ["F32", "Q8_0"]
    many = {f"{c}.weight": np.full((4, 32), np.nan, np.float32) for c in "abcdefg"}
    save_file({**many, "h.weight": tensors["b.weight"]}, tmp_path / "many.safetensors")
    with pytest.raises(ValueRefusedError, match=r"^7 tensors, 'a\.weight', .*'e\.weight' and 2 more: no format here"):
        plan(tmp_path / "many.safetensors", bpw=6, formats=["q8_0", "q4_0"])


def test_a_tree_is_to_be_saved_first() -> None:
    with pytest.raises(ValueRefusedError, match="model is a dict; a path or an opened model was expected"):
        plan({"w": np.zeros((4, 32), np.float32)}, bpw=6)  # type: ignore[arg-type]


def test_a_sample_is_said() -> None:
    p = plan(REAL, bpw=8, formats=FORMATS, sample=1024)
    assert p.sampled == 1024
    assert "errors are estimates from 1024 values of each tensor" in str(p)


def test_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved, dst = tmp_path / "plan.json", tmp_path / "m.gguf"
    base = ["model", "plan", REAL, "--formats", "q8_0,q5_0,q4_0"]
    assert main([*base, "--bpw", "8", "--keep", "head.queries", "--save", str(saved), "--json"]) == 0
    p = Plan.load(saved)
    assert json.loads(capsys.readouterr().out) == p.to_dict()
    assert p == plan(REAL, bpw=8, formats=["q8_0", "q5_0", "q4_0"], keep=["head.queries"])
    assert main([*base, "--target", str(p.target), "--keep", "head.queries", "--all"]) == 0
    shown = capsys.readouterr().out
    assert str(p.nbytes) in shown
    assert all(r.name in shown for r in p.rows)
    assert main(["model", "convert", REAL, str(dst), "--plan", str(saved)]) == 0
    assert sum(t.n_bytes for t in GGUFReader(dst).tensors) == p.nbytes
    capsys.readouterr()
    assert main(["model", "plan", str(dst), "--bpw", "7", "--llama-quantize"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("llama-quantize --allow-requantize --tensor-type '^")
    assert shown.endswith(f" {dst} planned.gguf Q4_0\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--bpw", "1"], 2, "below the smallest possible size"),
        (["--target", "1 apple"], 2, "size '1 apple' is not like"),
        (["--bpw", "8", "--keep", "nothing=q8_0"], 2, "keep rule 'nothing' matches no tensor name"),
        (["--bpw", "8", "--imatrix", "missing.gguf"], 3, "missing.gguf: No such file"),
        (["--bpw", "8", "--save", REAL], 2, "is there already; --force replaces it"),
        (["--bpw", "8", "--llama-quantize"], 2, "takes a GGUF model to GGUF"),
        (["--bpw", "8", "--save", "nowhere/p.json"], 3, "nowhere/p.json: No such file"),
    ],
)
def test_shell_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str) -> None:
    assert main(["model", "plan", REAL, "--formats", "q8_0,q4_0", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_what_can_be_said_before_measuring_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("apsi_inspect.ops.plan.plan", None)  # calling it would be a TypeError
    assert main(["model", "plan", REAL, "--bpw", "8", "--save", "nowhere/p.json"]) == 3
    assert main(["model", "plan", REAL, "--bpw", "8", "--llama-quantize"]) == 2
    assert main(["model", "plan", "m.gguf", "--bpw", "8", "--container", "apsim", "--llama-quantize"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_public_names() -> None:
    assert ai.plan is plan
    assert ai.Plan is Plan
