"""The quantization lab's state: what a run measures, cancel, picks, the plan and its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import apsi_inspect as ai
from apsi_inspect.notebook.state_error import WORST, QuantErrorState
from apsi_inspect.parts import to_text


@pytest.fixture
def state(tmp_path: Path) -> QuantErrorState:
    rng = np.random.default_rng(1)
    tensors = {f"blk.{i}.w": rng.normal(size=(8, 64 * (i + 1))).astype(np.float32) for i in range(4)}
    tensors["norm"] = np.ones(5, np.float32)
    path = tmp_path / "model.safetensors"
    ai.save_safetensors(path, tensors)
    made = QuantErrorState(ai.open(path))
    made.set_formats(["q8_0", "q4_0"])
    made.sample = None
    return made


def test_a_run_measures_what_quant_error_does(state: QuantErrorState) -> None:
    state.run()
    state.job.wait(60)
    assert state.job.status == "done"
    assert state.table is not None
    expected = ai.quant_error(state.model, ["q8_0", "q4_0"], progress=False)
    assert [tuple(r) for r in state.table.rows] == [tuple(r) for r in sorted(expected.rows, key=lambda r: r.name)]
    text = to_text(state.totals_parts())
    assert "All 5 tensors" in text
    assert "estimates" not in text
    assert state.names() == [f"blk.{i}.w" for i in range(4)] + ["norm"]


def test_tensors_formats_and_order_are_checked(state: QuantErrorState) -> None:
    state.tensors = "BLK.1"
    assert state.names() == ["blk.1.w"]
    state.tensors = "blk.?.w"
    assert len(state.names()) == 4
    state.tensors = "nowhere"
    with pytest.raises(ai.ValueRefusedError, match="no tensor matches"):
        state.run()
    for wrong in ([], ["q9_9"]):
        with pytest.raises(ai.ValueRefusedError):
            state.set_formats(wrong)
    with pytest.raises(ai.ValueRefusedError):
        state.set_order("colour")
    assert state.formats == ["q8_0", "q4_0"]


def test_a_cancelled_run_keeps_what_was_measured(state: QuantErrorState) -> None:
    seen = 0

    def stop_after_two() -> None:
        nonlocal seen
        seen += 1
        if state.job.done:
            state.job.cancel()

    state.job.changed = stop_after_two
    progress_every = "apsi_inspect.notebook.state_job._EVERY"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_every, 0.0)
        state.run()
        state.job.wait(60)
    assert state.job.status == "cancelled"
    assert state.table is not None
    assert 0 < len(state.page_lines()) < 5
    assert f"{len(state.page_lines())} of 5 tensors were measured" in to_text(state.totals_parts())


def test_worst_first_picks_and_plan(state: QuantErrorState, tmp_path: Path) -> None:
    with pytest.raises(ai.ValueRefusedError, match="measure first"):
        state.make_plan(6)
    state.run()
    state.job.wait(60)
    state.set_order(WORST)
    assert state.table is not None
    worst = {r.name: r.sums.sqnr_db for r in state.table.rows if r.format == "q4_0" and r.sums is not None}
    assert [n for n, _ in state.page_lines()][:4] == sorted(worst, key=lambda n: worst[n])
    state.select("blk.3.w")
    state.pick("q8_0")
    assert "← picked" in to_text(state.tensor_parts())
    assert dict(state.page_lines())["blk.3.w"][-1] == "→ q8_0"
    with pytest.raises(ai.ValueRefusedError):
        state.pick("int4")
    state.make_plan(7.6)
    state.plan_job.wait(60)
    assert state.plan is not None
    chosen = {r.name: r.chosen for r in state.plan.rows}
    assert chosen["blk.3.w"] == "Q8_0"
    assert state.plan.bpw <= 7.6
    path = tmp_path / "plan.json"
    assert state.save_plan(f" {path} ") == str(path)
    assert json.loads(path.read_text())["rows"]
    assert "Plan for gguf" in to_text(state.plan_parts())
    state.pick(None)
    assert state.picks == {}
    state.make_plan(0.1)
    state.plan_job.wait(60)
    assert "below the smallest" in to_text(state.plan_parts())
