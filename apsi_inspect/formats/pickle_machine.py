"""The machine that follows a pickle: a stack, a memo, and what each step does to inert nodes.

Contract: nothing is imported, called or looked up. A name is noted (`find`), a call is written down (`call`). What a
real unpickler would refuse is a `PickleError`. `pickle_reader.py` has the opcodes; `tests/test_pickle.py` enforces it.
"""

from __future__ import annotations

from .pickle_nodes import Call, Dict, Global, Persistent, PickleError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_NODES = 1_000_000  # containers, calls, and pairs that are copied
MAX_GLOBALS = 10_000  # different names
_MAX_LINE = 1 << 20  # bytes of a line of protocol 0
MARK = object()

# Calls that make an empty or filled dict; BUILD, SETITEM then apply to that.
_DICTS = {"collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict"}
_BYTES = ("_codecs.encode", "builtins.bytes", "builtins.bytearray")  # calls that copy a text
_TENSOR_MAKERS = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.nn.parameter.Parameter")
_RENAMED = {
    "__builtin__": "builtins",
    "exceptions": "builtins",
    "copy_reg": "copyreg",
    "torch.tensor": "torch._tensor",
}
_XRANGE = ("__builtin__", "xrange")  # what protocol 2 calls a range


class Machine:
    """One pass over one stream of opcodes.

    Attributes
    ----------
    globals
        Dotted name -> how often the stream asks for it, also where it is thrown away afterwards.
    computed
        What the stream does that cannot be told from its text: names made up while running, calls of results.
    persistent
        Every persistent id that the stream refers to.
    position
        Where the stream has been read to.
    """

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data, self.position, self.start = data, position, position
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[str, int] = {}
        self.computed: list[str] = []
        self.protocol = 0
        self.nodes = 0
        self.persistent: list[Persistent] = []

    def made(self, n: int = 1) -> None:
        """Count what takes memory beyond the bytes that ask for it."""
        self.nodes += n
        if self.nodes > MAX_NODES:
            raise self.fail(f"pickle makes more than {MAX_NODES} objects")

    def fail(self, reason: str) -> PickleError:
        """An error at the current place."""
        return PickleError(reason, self.position - self.start)

    def take(self, n: int) -> bytes:
        """The next n bytes of the stream."""
        at = self.position
        if n < 0 or at + n > len(self.data):
            raise self.fail(f"pickle is truncated: {n} bytes are needed, {len(self.data) - at} are left")
        self.position = at + n
        return self.data[at : at + n]

    def line(self) -> bytes:
        """The next line, without its end."""
        at = self.position
        end = self.data.find(b"\n", at, at + _MAX_LINE)
        if end < 0:
            raise self.fail("pickle is truncated: a line does not end")
        self.position = end + 1
        return self.data[at:end]

    def counted(self, width: int) -> bytes:
        """Bytes with their length before them."""
        return self.take(int.from_bytes(self.take(width), "little"))

    def push_list(self, items: list[Any]) -> None:
        """Push a list."""
        self.made()
        self.stack.append(items)

    def push_set(self, kind: str, items: list[Any]) -> None:
        """Push a set or frozenset, as the call that older protocols write for it; what is added comes after."""
        self.made()
        self.stack.append(Call(Global("builtins", kind), (items,)))

    def push_dict(self) -> None:
        """Push an empty dict."""
        self.made()
        self.stack.append(Dict())

    def refer(self, pid: Any) -> None:
        """Push a persistent id."""
        self.made()
        self.persistent.append(Persistent(pid))
        self.stack.append(self.persistent[-1])

    def pop(self) -> Any:
        """The top of the stack."""
        if not self.stack or self.stack[-1] is MARK:
            raise self.fail("pickle is invalid: it takes from an empty stack")
        return self.stack.pop()

    def top(self) -> Any:
        """The top of the stack, left there."""
        if not self.stack or self.stack[-1] is MARK:
            raise self.fail("pickle is invalid: it takes from an empty stack")
        return self.stack[-1]

    def to_mark(self) -> list[Any]:
        """What stands above the last mark; the mark goes too."""
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise self.fail("pickle is invalid: no mark on the stack")

    def put(self, key: int) -> None:
        """Remember the top of the stack."""
        if key < 0:
            raise self.fail("pickle is invalid: a negative place in the memo")
        self.memo[key] = self.top()

    def get(self, key: int) -> None:
        """Push what was remembered."""
        if key not in self.memo:
            raise self.fail(f"pickle is invalid: nothing was put at place {key} of the memo")
        self.stack.append(self.memo[key])

    def find(self, module: Any, name: Any) -> Global:
        """Note that a name is wanted."""
        computed = not (isinstance(module, str) and isinstance(name, str))
        if computed:
            found = Global("(computed)", "(computed)", True)
            self.computed.append("STACK_GLOBAL takes a name that is computed while the pickle runs")
        else:
            found = Global(_RENAMED.get(module, module), "range" if (module, name) == _XRANGE else name)
        path = found.path
        self.globals[path] = self.globals.get(path, 0) + 1
        if len(self.globals) > MAX_GLOBALS:
            raise self.fail(f"pickle asks for more than {MAX_GLOBALS} names")
        return found

    def call(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        """The node of a call; of a dict-like class, the dict."""
        if not isinstance(args, tuple):
            raise self.fail("pickle is invalid: a call without a tuple of arguments")
        self.made()
        if isinstance(func, Persistent) and isinstance(func.pid, tuple) and func.pid[:1] == ("module",):
            func = func.pid[1] if len(func.pid) > 1 else None  # old files: a class, with its source beside it
        if not isinstance(func, Global):
            if not isinstance(func, (Call, Persistent)):
                raise self.fail(f"pickle is invalid: {type(func).__name__} is called")
            self.computed.append("the result of a call is called")
            return Call(func, args, kwargs)
        if args and func.path in _BYTES and isinstance(args[0], str):
            self.made(len(args[0]) // 256)
        if args and func.path in _DICTS and isinstance(args[0], list):  # looked at whole, also where it holds no pairs
            self.made(len(args[0]) // 4)
        if func.path in _DICTS and (not args or func.name == "defaultdict" or _pairs_of(args[0]) is not None):
            made = Dict()
            if args and func.name != "defaultdict":
                made.pairs += _pairs_of(args[0]) or []
                self.made(len(made.pairs))
            return made
        return Call(func, args, kwargs)

    def build(self, state: Any) -> None:
        """BUILD: remember the state of an object."""
        target = self.top()
        if isinstance(target, (Call, Dict)):
            target.state = state
        elif isinstance(target, Global):
            self.computed.append(f"BUILD sets attributes of {target.path}")
        else:
            raise self.fail(f"pickle is invalid: BUILD on a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """SETITEM(S)."""
        target = self.top()
        if len(items) % 2:
            raise self.fail("pickle is invalid: a key without a value")
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, Dict):
            target.pairs += pairs
        elif isinstance(target, Call) and not target.path.startswith(_TENSOR_MAKERS):
            target.items += pairs
        else:
            kind = "tensor" if isinstance(target, Call) else type(target).__name__
            raise self.fail(f"pickle is invalid: SETITEM on a {kind}, a dict was expected")

    def append(self, items: list[Any]) -> None:
        """APPEND(S), ADDITEMS."""
        target = self.top()
        if isinstance(target, list):
            target += items
        elif isinstance(target, Call) and not target.path.startswith(_TENSOR_MAKERS):
            target.appended += items
        else:
            kind = "tensor" if isinstance(target, Call) else type(target).__name__
            raise self.fail(f"pickle is invalid: APPEND to a {kind}, a list was expected")


def _pairs_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The pairs of a dict or of a list of pairs."""
    if isinstance(value, Dict):
        return value.pairs
    if isinstance(value, list) and all(isinstance(p, (tuple, list)) and len(p) == 2 for p in value):
        return [(p[0], p[1]) for p in value]
    return None
