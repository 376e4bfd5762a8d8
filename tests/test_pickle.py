"""The pickle reader: the same plain values as `pickle`, inert nodes for the rest, verdicts on names."""

from __future__ import annotations

import collections
import contextlib
import decimal
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apsi_inspect.formats.pickle_globals import ALLOWED, KNOWN, verdict
from apsi_inspect.formats.pickle_machine import Machine
from apsi_inspect.formats.pickle_nodes import Call, Dict, Global, Persistent, PickleError
from apsi_inspect.formats.pickle_reader import _OPS, run

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def follow(data: bytes) -> Any:
    return run(Machine(data))


def python(node: Any) -> Any:
    """Plain values as Python has them."""
    if isinstance(node, Dict):
        return {python(k): python(v) for k, v in node.pairs}
    if isinstance(node, (list, tuple)):
        return type(node)(python(v) for v in node)
    if isinstance(node, Call):  # protocols 0 to 2 spell bytes and bytearray as calls
        if node.path == "_codecs.encode":
            return node.args[0].encode("latin-1")
        return bytes(python(node.args[0])) if node.args else b""
    return node


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(plain, st.sampled_from(list(PROTOCOLS)))
@settings(max_examples=200, deadline=None)
def test_plain_values(value: Any, protocol: int) -> None:
    assert python(follow(pickle.dumps(value, protocol))) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_values_stay_shared(protocol: int) -> None:
    inner = [1]
    found = follow(pickle.dumps([inner, inner, {"a": inner}], protocol))
    assert found[0] is found[1] is found[2].get("a")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_container_may_contain_itself(protocol: int) -> None:
    value: list[Any] = []
    value.append(value)
    found = follow(pickle.dumps(value, protocol))
    assert found[0] is found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_become_nodes(protocol: int) -> None:
    value = {"c": collections.Counter("aab"), "d": decimal.Decimal("1.50"), "f": len}
    machine = Machine(pickle.dumps(value, protocol))
    found = run(machine)
    assert found.get("c").pairs == [("a", 2), ("b", 1)]
    number = found.get("d")
    assert isinstance(number, Call)
    assert (number.path, number.args) == ("decimal.Decimal", ("1.50",))
    assert isinstance(found.get("f"), Global)
    assert found.get("f").path == "builtins.len"
    assert set(machine.globals) == {"collections.Counter", "decimal.Decimal", "builtins.len"}


def test_every_opcode_of_python_is_known() -> None:
    codes = {ord(o.code) for o in pickletools.opcodes} - {ord(".")}
    assert codes == set(_OPS)


def test_state_items_and_persistent_ids() -> None:
    made_node = b"cmodule\nClass\n)\x81}X\x01\x00\x00\x00aK\x01sbX\x01\x00\x00\x00kK\x02s"
    data = b"\x80\x02" + made_node + b"X\x03\x00\x00\x00pidQ\x86."
    made, pid = follow(data)
    assert (made.path, made.state.pairs, made.items) == ("module.Class", [("a", 1)], [("k", 2)])
    assert isinstance(pid, Persistent)
    assert pid.pid == "pid"


BROKEN = {
    "no STOP": (b"\x80\x02K\x01", "truncated"),
    "empty": (b"", "truncated"),
    "nothing on the stack": (b"\x80\x02.", "empty stack"),
    "unknown opcode": (b"\x80\x02\xff.", "unknown opcode"),
    "protocol 6": (b"\x80\x06N.", "protocol 6"),
    "text beyond the end": (b"\x80\x02X\xff\xff\xff\x7fab.", "truncated"),
    "8-byte text": (b"\x80\x04\x8d" + b"\xff" * 8 + b"ab.", "truncated"),
    "long beyond the end": (b"\x80\x02\x8b\xff\xff\xff\x7f\x01.", "truncated"),
    "frame beyond the end": (b"\x80\x04\x95" + b"\xff" * 7 + b"\x3fN.", "FRAME"),
    "memo that was not put": (b"\x80\x02h\x07.", "nothing was put"),
    "odd dict": (b"\x80\x02(K\x01d.", "without a value"),
    "append to a dict": (b"\x80\x02}K\x01a.", "APPEND"),
    "set in a list": (b"\x80\x02]K\x01K\x02s.", "SETITEM"),
    "state of a list": (b"\x80\x02]K\x01b.", "BUILD"),
    "call of a list": (b"\x80\x02])R.", "is called"),
    "call without a tuple": (b"\x80\x02cm\nf\nNR.", "tuple"),
    "no mark": (b"\x80\x02K\x01t.", "no mark"),
    "mark as a value": (b"\x80\x02(\x85.", "empty stack"),
    "not UTF-8": (b"\x80\x02X\x01\x00\x00\x00\xff.", "UTF-8"),
    "no integer": (b"Iabc\n.", "no integer"),
    "5000 digits": (b"I" + b"1" * 5000 + b"\n.", "integer of 5000 digits"),
    "no float": (b"Fabc\n.", "no float"),
    "no quotes": (b"Sabc\n.", "quotes"),
    "wrong escape": (b"S'\\x1'\n.", "escape"),
    "line without end": (b"cos", "line"),
    "negative memo": (b"Np-1\n.", "negative"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken(what: str) -> None:
    data, word = BROKEN[what]
    with pytest.raises(PickleError, match=word):
        follow(data)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_crash_it(data: bytes) -> None:
    with contextlib.suppress(PickleError):
        follow(b"\x80\x04" + data)


def test_computed_names() -> None:
    machine = Machine(b"\x80\x04\x8c\x02os\x8c\x06system\x93]\x93.")
    run(machine)
    assert machine.computed
    assert any(path.startswith("(computed)") for path in machine.globals)


def test_verdicts() -> None:
    for path in ("os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "builtins.getattr"):
        assert verdict(path) == "dangerous"
    for path in ("runpy._run_code", "pip.main", "uuid._get_command_stdout", "torch.load", "torch.hub.load"):
        assert verdict(path) == "dangerous"
    for path in ("pkgutil.resolve_name", "functools.partial", "copyreg.extension 7", "math.__dict__.get"):
        assert verdict(path) == "dangerous"
    for path in ("builtins.type", "builtins.type.mro", "torch.UntypedStorage.from_file", "torch.storage.io.open"):
        assert verdict(path) == "dangerous"
    for path in (
        "torch._utils.torch.load",
        "mine.io.open",
        "torch.storage._TypedStorage._new_shared",
        "a.torch.jit.load",
    ):
        assert verdict(path) == "dangerous"
    for path in ("mine.io.Reader", "mine.torch.Net", "__torch__.net.Net"):
        assert verdict(path) == "unknown"
    assert verdict("__torch__.net.Net", script=True) == "known"
    assert verdict("__torch__.os.system", script=True) == "dangerous"
    for path in ("omegaconf.listconfig.ListConfig", "__main__.Net", "math.floor", "builtins.len"):
        assert verdict(path) == "unknown"
    for path in ("collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "builtins.set"):
        assert verdict(path) == "allowed"
    for path in ("argparse.Namespace", "numpy.core.multiarray.scalar", "uuid.UUID"):
        assert verdict(path) == "known"
    assert not ALLOWED & KNOWN


def test_everything_that_torch_allows_is_allowed() -> None:
    pytest.importorskip("torch", reason="torch, whose list it is, is not installed (extra: torch)")
    from torch._weights_only_unpickler import _get_allowed_globals

    assert set(_get_allowed_globals()) <= ALLOWED
