"""A pickle read into inert nodes: the opcodes, each as one small step of a `Machine`.

Contract: time and memory are proportional to the bytes read, at most `MAX_OPS` opcodes; nothing of the file is run.
`tests/test_pickle.py` compares with `pickle` itself, and runs attacks.
"""

from __future__ import annotations

import struct

from ..errors import quote
from .base import PausedGC
from .pickle_machine import MARK, Machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_OPS = 4_000_000
MAX_PICKLE = 64 << 20  # bytes of one stream


def run(m: Machine) -> Any:
    """Follow a stream up to its STOP and return what stands on top.

    Raises
    ------
    PickleError
        It is malformed, truncated or too long.
    """
    with PausedGC():
        return _run(m)


def _run(m: Machine) -> Any:
    data = m.data
    for _ in range(MAX_OPS):
        if m.position >= len(data):
            raise m.fail("pickle is truncated: it has no STOP")
        code = data[m.position]
        m.position += 1
        if code == 0x2E:
            return m.pop()
        op = _OPS.get(code)
        if op is None:
            raise m.fail(f"pickle is invalid: unknown opcode 0x{code:02x}")
        op(m)
    raise m.fail(f"pickle has more than {MAX_OPS} opcodes")


def _text(raw: bytes) -> str | bytes:
    """A string of Python 2: text where it is UTF-8, as torch reads it."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _utf8(m: Machine, raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise m.fail("pickle is invalid: a text is not UTF-8") from None


def _decimal(m: Machine, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError:
        if raw.strip().lstrip(b"-+").isdigit():
            raise m.fail(f"pickle has an integer of {len(raw)} digits, which Python does not read either") from None
        raise m.fail(f"pickle is invalid: {quote(raw[:40].decode('latin-1'))} is no integer") from None


def _int(m: Machine) -> None:
    raw = m.line()
    m.stack.append({b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else _decimal(m, raw))


def _float(m: Machine) -> None:
    raw = m.line()
    try:
        m.stack.append(float(raw))
    except ValueError:
        raise m.fail(f"pickle is invalid: {quote(raw[:40].decode('latin-1'))} is no float") from None


def _string(m: Machine) -> None:
    raw = m.line()
    if len(raw) < 2 or raw[:1] not in (b"'", b'"') or raw[-1:] != raw[:1]:
        raise m.fail("pickle is invalid: a string without quotes")
    import codecs

    try:
        m.stack.append(_text(codecs.escape_decode(raw[1:-1])[0]))
    except ValueError:
        raise m.fail("pickle is invalid: a wrong escape in a string") from None


def _unicode(m: Machine) -> None:
    try:
        m.stack.append(m.line().decode("raw-unicode-escape"))
    except UnicodeDecodeError:
        raise m.fail("pickle is invalid: a wrong escape in a text") from None


def _global(m: Machine) -> None:
    module, name = _utf8(m, m.line()), _utf8(m, m.line())
    m.stack.append(m.find(module, name))


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    m.stack.append(m.find(module, name))


def _inst(m: Machine) -> None:
    module, name = _utf8(m, m.line()), _utf8(m, m.line())
    func = m.find(module, name)
    m.stack.append(m.call(func, tuple(m.to_mark())))


def _obj(m: Machine) -> None:
    items = m.to_mark()
    if not items:
        raise m.fail("pickle is invalid: OBJ without a class")
    m.stack.append(m.call(items[0], tuple(items[1:])))


def _extension(width: int) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        code = int.from_bytes(m.take(width), "little")
        m.stack.append(m.find("copyreg", f"extension {code}"))

    return op


def _reduce(m: Machine) -> None:
    args, func = m.pop(), m.pop()
    m.stack.append(m.call(func, args))


def _newobj_ex(m: Machine) -> None:
    kwargs, args, func = m.pop(), m.pop(), m.pop()
    m.stack.append(m.call(func, args, kwargs))


def _dict(m: Machine) -> None:
    items = m.to_mark()
    m.push_dict()
    m.set_items(items)


def _pop(m: Machine) -> None:
    if not m.stack:
        raise m.fail("pickle is invalid: it takes from an empty stack")
    m.stack.pop()


def _frame(m: Machine) -> None:
    length = int.from_bytes(m.take(8), "little")
    if length > len(m.data) - m.position:
        raise m.fail(f"pickle is truncated: a FRAME of {length} bytes, {len(m.data) - m.position} are left")


def _proto(m: Machine) -> None:
    m.protocol = m.take(1)[0]
    if m.protocol > 5:
        raise m.fail(f"pickle has protocol {m.protocol}; up to 5 is known")


def _integer(width: int, signed: bool) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(int.from_bytes(m.take(width), "little", signed=signed))


def _long(width: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(int.from_bytes(m.counted(width), "little", signed=True))


def _texts(width: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(_utf8(m, m.counted(width)))


def _python2(width: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(_text(m.counted(width)))


def _bytes(width: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.counted(width))


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


def _tuple(n: int) -> Callable[[Machine], None]:
    def op(m: Machine) -> None:
        items = [m.pop() for _ in range(n)]
        m.stack.append(tuple(reversed(items)))

    return op


def _two(m: Machine) -> list[Any]:
    value, key = m.pop(), m.pop()
    return [key, value]


def _one(m: Machine) -> list[Any]:
    return [m.pop()]


_OPS: dict[int, Callable[[Machine], None]] = {
    ord(c): op
    for c, op in {
        "(": _constant(MARK),
        "0": _pop,
        "1": lambda m: [m.to_mark()].clear(),
        "2": lambda m: m.stack.append(m.top()),
        "F": _float,
        "I": _int,
        "J": _integer(4, True),
        "K": _integer(1, False),
        "L": lambda m: m.stack.append(_decimal(m, m.line().removesuffix(b"L"))),
        "M": _integer(2, False),
        "N": _constant(None),
        "P": lambda m: m.refer(_text(m.line())),
        "Q": lambda m: m.refer(m.pop()),
        "R": _reduce,
        "S": _string,
        "T": _python2(4),
        "U": _python2(1),
        "V": _unicode,
        "X": _texts(4),
        "a": lambda m: m.append(_one(m)),
        "b": lambda m: m.build(m.pop()),
        "c": _global,
        "d": _dict,
        "}": lambda m: m.push_dict(),
        "e": lambda m: m.append(m.to_mark()),
        "g": lambda m: m.get(_decimal(m, m.line())),
        "h": lambda m: m.get(m.take(1)[0]),
        "i": _inst,
        "j": lambda m: m.get(int.from_bytes(m.take(4), "little")),
        "l": lambda m: m.push_list(m.to_mark()),
        "]": lambda m: m.push_list([]),
        "o": _obj,
        "p": lambda m: m.put(_decimal(m, m.line())),
        "q": lambda m: m.put(m.take(1)[0]),
        "r": lambda m: m.put(int.from_bytes(m.take(4), "little")),
        "s": lambda m: m.set_items(_two(m)),
        "t": lambda m: m.stack.append(tuple(m.to_mark())),
        ")": _constant(()),
        "u": lambda m: m.set_items(m.to_mark()),
        "G": lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
        "B": _bytes(4),
        "C": _bytes(1),
    }.items()
} | {
    0x80: _proto,
    0x81: _reduce,  # NEWOBJ: class and arguments, as in a call
    0x82: _extension(1),
    0x83: _extension(2),
    0x84: _extension(4),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x88: _constant(True),
    0x89: _constant(False),
    0x8A: _long(1),
    0x8B: _long(4),
    0x8C: _texts(1),
    0x8D: _texts(8),
    0x8E: _bytes(8),
    0x8F: lambda m: m.push_set("set", []),
    0x90: lambda m: m.append(m.to_mark()),
    0x91: lambda m: m.push_set("frozenset", m.to_mark()),
    0x92: _newobj_ex,
    0x93: _stack_global,
    0x94: lambda m: m.put(len(m.memo)),
    0x95: _frame,
    0x96: _bytes(8),
    0x97: lambda m: m.refer("out-of-band buffer"),
    0x98: lambda m: None,  # READONLY_BUFFER
}
