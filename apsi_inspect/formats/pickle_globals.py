"""What the names that a pickle asks for mean: which build tensors and plain values, which run code.

`verdict` sorts a dotted name into ``"allowed"`` (torch's own ``weights_only`` list and builtin types), ``"known"``
(harmless, and read here, but not on that list), ``"dangerous"`` (runs code, or is a step towards it) and ``"unknown"``.
Data only; nothing here is imported. `tests/test_pickle.py` compares the list with torch's.
"""

from __future__ import annotations

# torch's dtypes and storages -> our encoding. `docs/formats.md`, 4.3.
DTYPES = {
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
    "double": "F64",
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "short": "I16",
    "int32": "I32",
    "int": "I32",
    "int64": "I64",
    "long": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex32": "C32",
    "chalf": "C32",
    "complex64": "C64",
    "cfloat": "C64",
    "complex128": "C128",
    "cdouble": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "qint8": "I8",
    "quint8": "U8",
    "qint32": "I32",
    "bits8": "U8",
    "bits16": "U16",
}
STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "QInt8Storage": "I8",
    "QUInt8Storage": "U8",
    "QInt32Storage": "I32",
    "QUInt4x2Storage": "U8",
    "QUInt2x4Storage": "U8",
    "UntypedStorage": "U8",
    "_UntypedStorage": "U8",
}
STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")

_REBUILD = {
    "torch._utils": (
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
        "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_meta_tensor_no_storage "
        "_rebuild_nested_tensor _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy "
        "_rebuild_device_tensor_from_cpu_tensor"
    ),
    "torch._tensor": "_rebuild_from_type _rebuild_from_type_v2",
    "torch.nn.parameter": "Parameter Buffer UninitializedParameter UninitializedBuffer",
    "torch.serialization": "_get_layout",
    "torch.storage": "UntypedStorage _UntypedStorage TypedStorage",
    "collections": "OrderedDict Counter",
    "builtins": "set bytearray complex dict list tuple frozenset int float str bool bytes slice range object long",
    "_codecs": "encode",
}
_QSCHEMES = (
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric per_channel_affine_float_qparams"
)
_MORE_DTYPES = "quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 " + " ".join(
    f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)
)
_LAYOUTS = "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged"
_FORMATS = "contiguous_format preserve_format channels_last channels_last_3d"
# Names that stand for themselves: dtypes, quantization schemes, layouts, memory formats.
CONSTANTS: frozenset[str] = frozenset(
    f"torch.{name}"
    for name in (*DTYPES, *_QSCHEMES.split(), *_MORE_DTYPES.split(), *_LAYOUTS.split(), *_FORMATS.split())
)
ALLOWED: frozenset[str] = frozenset(
    [f"{module}.{name}" for module, names in _REBUILD.items() for name in names.split()]
    + [f"torch.{name}" for name in (*DTYPES, *_QSCHEMES.split(), *_MORE_DTYPES.split())]
    + [f"{module}.{name}" for module in STORAGE_MODULES for name in STORAGES]
    + [f"torch.{part}{kind}Tensor" for part in ("", "cuda.", "sparse.", "cuda.sparse.") for kind in
       ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int", "Long", "Bool")]
    + ["torch.Size", "torch.Tensor", "torch.device", "torch.layout", "torch.strided", "torch.sparse_coo"]
    + [f"torch.{m}_format" for m in ("contiguous", "preserve")]
)  # fmt: skip

# Not on torch's list, but plain data, which we read ourselves or keep as a name.
_KNOWN = {
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy": "ndarray dtype float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_ bool",
    "collections": "defaultdict deque",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "pathlib": "Path PurePath PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PurePath PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "datetime": "datetime date time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID SafeUUID",
    "copyreg": "_reconstructor",
    "array": "_array_reconstructor",
    "torch.storage": "_TypedStorage",
    "torch.jit._pickle": "build_intlist build_doublelist build_boollist build_tensorlist restore_type_tag",
}
KNOWN: frozenset[str] = frozenset(f"{module}.{name}" for module, names in _KNOWN.items() for name in names.split())

# Modules of which any name is a way to run code, open files or connections; with everything below them. Also functions.
DANGEROUS_MODULES = frozenset(
    (
        "thread cPickle urllib2 xmlrpclib anydbm SocketServer BaseHTTPServer "
        "os posix nt posixpath ntpath subprocess _posixsubprocess sys socket _socket socketserver ssl shutil runpy "
        "pty pdb bdb ctypes _ctypes cffi asyncio webbrowser pip ensurepip pickle _pickle cloudpickle dill joblib "
        "jsonpickle marshal timeit cProfile profile trace urllib requests httpx aiohttp http https httplib ftplib "
        "telnetlib smtplib imaplib poplib xmlrpc uuid venv pydoc pkgutil importlib imp zipimport code codeop commands "
        "popen2 multiprocessing _thread signal atexit compileall py_compile idlelib lib2to3 doctest distutils "
        "setuptools pkg_resources site fileinput fcntl termios readline rlcompleter cmd antigravity sqlite3 shelve "
        "dbm functools.partial functools.reduce operator _operator io _io _pyio codecs _codecs linecache "
        "logging.config logging.FileHandler logging.handlers types.CodeType types.FunctionType types.MethodType "
        "threading.Thread numpy.testing numpy.f2py numpy.load numpy.fromfile numpy.save _sqlite3 "
        "numpy.savetxt numpy.savez numpy.savez_compressed numpy.loadtxt numpy.genfromtxt numpy.DataSource "
        "torch.from_file torch.jit._serialization "
        "numpy.memmap numpy.lib.npyio numpy.ctypeslib numpy.distutils pandas.io pandas.eval pandas.core.computation "
        "torch.load torch.save torch.hub torch.serialization torch.jit.load torch.jit.unsupported_tensor_ops "
        "torch.utils.collect_env torch.utils._config_module torch.utils.cpp_extension torch.utils.bottleneck "
        "torch._inductor torch._dynamo torch.fx.graph_module torch.fx.experimental torch.storage._load_from_bytes "
        "torch.package torch.ops torch.classes torch.testing torch.compile torch.multiprocessing huggingface_hub "
        "IPython ipykernel fsspec s3fs boto3 paramiko fabric invoke sh plumbum pexpect ptyprocess psutil win32api "
        "win32com winreg _winapi msvcrt yaml ruamel jinja2 mako sympy.parsing sympy.sympify keras.models "
        "tensorflow.keras.models"
    ).split()
)
# builtins that are no plain type or constant; `type` makes classes
_BUILTINS = frozenset(
    (
        "eval exec execfile compile getattr setattr delattr open file apply breakpoint __import__ reload input globals "
        "locals vars type map filter memoryview help exit quit print __build_class__"
    ).split()
)


# modules that other modules hold as attributes: a name that goes through one is a way in
_MODULES_WITHIN = frozenset("os sys subprocess posix nt builtins importlib shutil socket ctypes pickle".split())


_LIBRARIES = ("io", "numpy", "pandas", "torch")  # modules that have harmless names as well
_OPENERS = frozenset("open open_code FileIO".split())  # of io


def verdict(path: str, script: bool = False) -> str:
    """``"allowed"``, ``"known"``, ``"dangerous"`` or ``"unknown"``, of a dotted name.

    `script`: the pickle is one of a TorchScript archive, which has the code of its ``__torch__`` classes.
    """
    if path in ALLOWED:
        return "allowed"
    if path in KNOWN:
        return "known"
    if path.startswith(("(computed)", "copyreg.extension ")):
        return "dangerous"
    parts = path.split(".")
    if parts[0] == "builtins" and _BUILTINS.intersection(parts[1:]):
        return "dangerous"
    below = any(".".join(parts[:i]) in DANGEROUS_MODULES for i in range(1, min(len(parts), 64) + 1))
    if below or _through(parts) or (parts[0] == "pathlib" and len(parts) > 2):  # a method of a path
        return "dangerous"
    return "known" if script and parts[0] == "__torch__" else "unknown"


def _through(parts: list[str]) -> bool:
    """Whether a name is reached through attributes (Protocol 4: "module", "name.__globals__.get"): no plain import."""
    if any((p.startswith("__") and p.endswith("__")) or p.lstrip("_") in _MODULES_WITHIN for p in parts[1:]):
        return True
    if parts[0] == "torch" and any(p in STORAGES or p.endswith("TypedStorage") for p in parts[1:-1]):
        return True  # torch.UntypedStorage.from_file
    tails = [parts[i : i + 4] for i in range(1, min(len(parts), 64)) if parts[i] in _LIBRARIES]  # x.torch.jit.load
    return any(
        (tail[0] == "io" and not _OPENERS.isdisjoint(tail[1:2]))
        or any(".".join(tail[:n]) in DANGEROUS_MODULES for n in (2, 3, 4))
        for tail in tails
    )


def storage_of(module: str, name: str) -> str | None:
    """Encoding of a storage class; None where it is none."""
    return STORAGES.get(name) if module in STORAGE_MODULES else None
