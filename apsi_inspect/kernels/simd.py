"""Explicit vectors for the blocks that LLVM does not vectorise by itself.

An *emitter* writes the code of one block as LLVM vectors; `W` (a value) and `M` (a byte address) make it read as
arithmetic. LLVM splits the vectors into what the CPU has, so the same emitter serves SSE2, AVX2, AVX-512 and NEON::

    @emitter(M, M)
    def put_q8_0(src, dst):
        dst.store(src.load(I8, 32, 2).sitofp(F) * src.half().splat(32))

    @kernel
    def decode_q8_0_vec(raw, out, b0, b1):
        r, o = raw.ctypes.data, out.ctypes.data
        for b in range(b0, b1):
            put_q8_0(r + b * 34, o + b * 128)

Shifts to the right are logical, comparisons unsigned unless said otherwise. Nothing here contracts or reorders
floating-point arithmetic. `tests/test_kernels.py` runs every operation against NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ._jit import half_in_hardware

F, D, H = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
NAMES = {F: "f32", D: "f64", I8: "i8", I16: "i16", I32: "i32", I64: "i64"}
STREAM_FROM = 2**20  # elements of float32: smaller results stay in the caches, where whoever reads them next wants them
NUMBA = {F: types.float32, D: types.float64, I8: types.uint8, I16: types.uint16, I32: types.uint32, I64: types.uint64}


class W:
    """A scalar or vector value inside an emitter; plain Python numbers are constants of the same shape."""

    def __init__(self, b: Any, v: Any) -> None:
        self.b, self.v, self.t = b, v, v.type

    @property
    def elem(self) -> Any:
        return self.t.element if isinstance(self.t, ir.VectorType) else self.t

    @property
    def n(self) -> int:
        return self.t.count if isinstance(self.t, ir.VectorType) else 1

    @property
    def is_float(self) -> bool:
        return self.elem in (F, D, H)

    def const(self, x: float) -> Any:
        k = ir.Constant(self.elem, x)
        return ir.Constant(self.t, [k] * self.n) if isinstance(self.t, ir.VectorType) else k

    def like(self, x: float | W) -> W:
        """`x` as a value of this type."""
        return x if isinstance(x, W) else self.w(self.const(x))

    def w(self, v: Any) -> W:
        return W(self.b, v)

    def to(self, elem: Any) -> Any:
        return ir.VectorType(elem, self.n) if isinstance(self.t, ir.VectorType) else elem

    # -- arithmetic
    def _op(self, fop: str | None, iop: str | None, y: float | W) -> W:
        op = fop if self.is_float else iop
        if op is None:
            raise TypeError(f"no such operation on {self.t}")
        return self.w(getattr(self.b, op)(self.v, self.like(y).v))

    def __add__(self, y: float | W) -> W:
        return self._op("fadd", "add", y)

    def __sub__(self, y: float | W) -> W:
        return self._op("fsub", "sub", y)

    def __mul__(self, y: float | W) -> W:
        return self._op("fmul", "mul", y)

    def __truediv__(self, y: float | W) -> W:
        return self._op("fdiv", None, y)

    def __and__(self, y: int | W) -> W:
        return self._op(None, "and_", y)

    def __or__(self, y: int | W) -> W:
        return self._op(None, "or_", y)

    def __xor__(self, y: int | W) -> W:
        return self._op(None, "xor", y)

    def __lshift__(self, y: int | W) -> W:
        return self._op(None, "shl", y)

    def __rshift__(self, y: int | W) -> W:
        return self._op(None, "lshr", y)

    def sar(self, y: int | W) -> W:
        """Arithmetic shift to the right."""
        return self._op(None, "ashr", y)

    # -- comparison and selection; the results are masks (i1)
    def _cmp(self, op: str, y: float | W) -> W:
        f = self.b.fcmp_ordered if self.is_float else self.b.icmp_unsigned
        return self.w(f(op, self.v, self.like(y).v))

    def eq(self, y: float | W) -> W:
        return self._cmp("==", y)

    def lt(self, y: float | W) -> W:
        """Less than: ordered for floats, unsigned for integers."""
        return self._cmp("<", y)

    def gt(self, y: float | W) -> W:
        return self._cmp(">", y)

    def slt(self, y: int | W) -> W:
        """Signed less than."""
        return self.w(self.b.icmp_signed("<", self.v, self.like(y).v))

    def sel(self, a: W, z: W) -> W:
        """This mask chooses `a` where set, else `z`."""
        return self.w(self.b.select(self.v, a.v, z.v))

    def mask_bits(self) -> W:
        """A mask of n lanes as an n-bit integer, lane 0 in bit 0."""
        return self.w(self.b.bitcast(self.v, ir.IntType(self.n)))

    # -- conversion
    def _cast(self, op: str, elem: Any) -> W:
        return self.w(getattr(self.b, op)(self.v, self.to(elem)))

    def bits(self, elem: Any) -> W:
        """The same bits as elements of another type of equal width."""
        return self._cast("bitcast", elem)

    def sitofp(self, elem: Any = F) -> W:
        return self._cast("sitofp", elem)

    def uitofp(self, elem: Any = F) -> W:
        return self._cast("uitofp", elem)

    def fptosi(self, elem: Any) -> W:
        return self._cast("fptosi", elem)

    def zext(self, elem: Any) -> W:
        return self._cast("zext", elem)

    def sext(self, elem: Any) -> W:
        return self._cast("sext", elem)

    def trunc(self, elem: Any) -> W:
        return self._cast("trunc", elem)

    def fpext(self, elem: Any) -> W:
        return self._cast("fpext", elem)

    def fptrunc(self, elem: Any) -> W:
        return self._cast("fptrunc", elem)

    def half_to_float(self) -> W:
        """i16 holding halves -> float, exact; a signalling NaN comes out quiet (as F16C does)."""
        if half_in_hardware():
            return self.bits(H).fpext(F)
        u = self.zext(I32)
        a = u & 0x7FFF
        v = ((a << 13).bits(F) * 2.0**112).bits(I32)  # rebias by a multiplication, which also scales subnormals
        special = (a << 13) | 0x7F800000
        special = a.gt(0x7C00).sel(special | 0x00400000, special)
        return (a.lt(0x7C00).sel(v, special) | ((u & 0x8000) << 16)).bits(F)

    def float_to_half(self) -> W:
        """float -> i16 holding halves, nearest even; overflow to infinity, NaN to a quiet NaN."""
        if half_in_hardware():
            return self.fptrunc(H).bits(I16)
        u = self.bits(I32)
        a = u & 0x7FFFFFFF
        normal = (a + ((a >> 13) & 1) + 0xC8000FFF) >> 13
        small = (a.bits(F) + 0.5).bits(I32) - 0x3F000000  # the FPU rounds: the ulp of 0.5 is a half's subnormal step
        r = a.lt(0x38800000).sel(small, normal)
        r = a.lt(0x47800000).sel(r, a.like(0x7C00))
        r = a.gt(0x7F800000).sel(((a >> 13) & 0x3FF) | 0x7E00, r)
        return (r | ((u >> 16) & 0x8000)).trunc(I16)

    # -- lanes
    def splat(self, n: int) -> W:
        """A scalar in all of n lanes."""
        t = ir.VectorType(self.t, n)
        u = ir.Constant(t, ir.Undefined)
        v = self.b.insert_element(u, self.v, I32(0))
        return self.w(self.b.shuffle_vector(v, u, ir.Constant(ir.VectorType(I32, n), [0] * n)))

    def shuf(self, other: W, lanes: Iterable[int]) -> W:
        """The given lanes of this vector followed by `other`."""
        k = list(lanes)
        return self.w(self.b.shuffle_vector(self.v, other.v, ir.Constant(ir.VectorType(I32, len(k)), k)))

    def pick(self, lanes: Iterable[int]) -> W:
        """The given lanes of this vector."""
        return self.shuf(self, lanes)

    def cat(self, other: W) -> W:
        return self.shuf(other, range(self.n + other.n))

    def lane(self, i: int | W) -> W:
        return self.w(self.b.extract_element(self.v, i.v if isinstance(i, W) else I32(i)))

    def vector(self, values: Iterable[float]) -> W:
        """A constant vector of this element type."""
        k = [ir.Constant(self.elem, x) for x in values]
        return self.w(ir.Constant(ir.VectorType(self.elem, len(k)), k))

    # -- LLVM's intrinsic functions
    def call(self, name: str, *more: W, ret: Any = None) -> W:
        suffix = (f"v{self.n}" if isinstance(self.t, ir.VectorType) else "") + NAMES[self.elem]
        vs = [self.v, *(m.v for m in more)]
        t = ir.FunctionType(self.t if ret is None else ret, [v.type for v in vs])
        return self.w(self.b.call(self.b.module.declare_intrinsic(f"llvm.{name}.{suffix}", (), t), vs))

    def abs(self) -> W:
        return self.call("fabs")

    def round(self) -> W:
        """To the nearest integer, ties away from zero (C's roundf)."""
        return self.call("round")

    def rint(self) -> W:
        """To the nearest integer, ties to even."""
        return self.call("rint")

    def ctpop(self) -> W:
        return self.call("ctpop")

    def cttz(self) -> W:
        """Count of trailing zero bits; the width for 0."""
        no = self.w(I1(0))
        return self.call("cttz", no)

    def min_(self, y: int | W) -> W:
        """Unsigned minimum."""
        return self.call("umin", self.like(y))

    def smin(self, y: int | W) -> W:
        return self.call("smin", self.like(y))

    def smax(self, y: int | W) -> W:
        return self.call("smax", self.like(y))

    def reduce(self, name: str) -> W:
        """Integer reduction over the lanes: ``"umax"``, ``"add"``, ``"or"`` …"""
        return self.call("vector.reduce." + name, ret=self.elem)


class M:
    """Memory at a byte address."""

    def __init__(self, b: Any, a: Any) -> None:
        self.b, self.a = b, a

    def _at(self, t: Any, off: int) -> Any:
        return self.b.inttoptr(self.b.add(self.a, ir.Constant(self.a.type, off)), t.as_pointer())

    def plus(self, w: W) -> M:
        """The address `w` bytes further on (`w` an unsigned integer)."""
        v = w.v if w.t == self.a.type else self.b.zext(w.v, self.a.type)
        return M(self.b, self.b.add(self.a, v))

    def load(self, elem: Any, n: int = 1, off: int = 0) -> W:
        """n elements (a scalar for n = 1) at any alignment."""
        t = ir.VectorType(elem, n) if n > 1 else elem
        v = self.b.load(self._at(t, off))
        v.align = 1
        return W(self.b, v)

    def store(self, w: W, off: int = 0) -> None:
        self.b.store(w.v, self._at(w.t, off)).align = 1

    def stream(self, w: W, off: int = 0, align: int = 64) -> None:
        """Store past the caches: nothing is read first. **Faults unless the address is a multiple of `align`.**"""
        st = self.b.store(w.v, self._at(w.t, off))
        st.align = align
        st.set_metadata("nontemporal", self.b.module.add_metadata([I32(1)]))

    def prefetch(self, off: int) -> None:
        """Ask for the cache line `off` bytes ahead. Past the end of an array it does nothing, never faults."""
        p8 = I8.as_pointer()
        p = self.b.inttoptr(self.b.add(self.a, ir.Constant(self.a.type, off)), p8)
        t = ir.FunctionType(ir.VoidType(), [p8, I32, I32, I32])
        self.b.call(self.b.module.declare_intrinsic("llvm.prefetch.p0", (), t), [p, I32(0), I32(3), I32(1)])

    def half(self, off: int = 0) -> W:
        """A little-endian half as a float."""
        return self.load(I16, off=off).half_to_float()


def emitter(*kinds: Any, ret: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Make a Numba intrinsic out of a function that emits code.

    `kinds` are the arguments' kinds: `M` (a byte address, intp in the kernel) or an element type (`F`, `I32`, …; in
    the kernel float32, uint32, …). `ret` is the kind of the result, a `W` that the function returns, or None.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        args = [types.intp if k is M else NUMBA[k] for k in kinds]
        result: Any = types.none if ret is None else NUMBA[ret]
        sig = result(*args)

        def generate(context: Any, b: Any, _sig: Any, values: Any) -> Any:
            r = fn(*[M(b, v) if k is M else W(b, v) for k, v in zip(kinds, values, strict=True)])
            return context.get_dummy_value() if ret is None else r.v

        def define(_typing: Any, *_args: Any) -> Any:
            return sig, generate

        # Numba asks for the signature and cannot call a `*args` intrinsic, so say how many there are.
        names = ["typing", *(f"a{i}" for i in range(len(kinds)))]
        define.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_ONLY) for n in names])  # type: ignore[attr-defined]
        define.__name__, define.__qualname__, define.__module__ = fn.__name__, fn.__qualname__, fn.__module__
        define.__doc__ = fn.__doc__
        return intrinsic(define)

    return decorate


Put = Callable[..., None]  # M.store or M.stream: (value, offset = 0)


def stored_and_streamed(body: Callable[[M, Put], None]) -> tuple[Any, Any]:
    """Two emitters (source, destination) from one body(source, put): with ordinary and with streaming stores."""

    def stored(src: M, dst: M) -> None:
        body(src, dst.store)

    def streamed(src: M, dst: M) -> None:
        body(src, dst.stream)

    return emitter(M, M)(stored), emitter(M, M)(streamed)


@emitter(M, I64, ret=I64)
def streams(out: M, size: W) -> W:
    """Whether streaming stores are allowed (they fault on an unaligned address) and pay: 1 or 0.

    An emitter, not a kernel: a kernel more to compile would cost a tenth of a second in front of every first decode.
    """
    off = size.w(out.a) & 63
    return (off.eq(0) & (size.lt(STREAM_FROM) ^ True)).zext(I64)
