"""Independent ways to write and open GGUF: `gguf.GGUFWriter`, and ggml's C loader in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# The C loader ends the process on some bad files, so it runs in a child. Data is loaded too (no_alloc = false).
_CHILD = """
import ctypes, json, sys
from pathlib import Path
import libggml
lib = ctypes.CDLL(str(Path(libggml.__file__).parent / "lib64" / "libggml-base.so"))
class Params(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p))]
lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
lib.gguf_init_from_file.restype = ctypes.c_void_p
def typed(name, result, *arguments):
    f = getattr(lib, name)
    f.restype, f.argtypes = result, [ctypes.c_void_p, *arguments]
    return f
n_tensors = typed("gguf_get_n_tensors", ctypes.c_int64)
n_kv = typed("gguf_get_n_kv", ctypes.c_int64)
t_name = typed("gguf_get_tensor_name", ctypes.c_char_p, ctypes.c_int64)
t_type = typed("gguf_get_tensor_type", ctypes.c_int, ctypes.c_int64)
t_offset = typed("gguf_get_tensor_offset", ctypes.c_size_t, ctypes.c_int64)
t_size = typed("gguf_get_tensor_size", ctypes.c_size_t, ctypes.c_int64)
k_name = typed("gguf_get_key", ctypes.c_char_p, ctypes.c_int64)
k_type = typed("gguf_get_kv_type", ctypes.c_int, ctypes.c_int64)
out = []
for path in sys.argv[1:]:
    data = ctypes.c_void_p()
    ctx = lib.gguf_init_from_file(path.encode(), Params(False, ctypes.pointer(data)))
    out.append(ctx and {
        "keys": {k_name(ctx, i).decode(): k_type(ctx, i) for i in range(n_kv(ctx))},
        "tensors": {t_name(ctx, i).decode(): [t_type(ctx, i), t_offset(ctx, i), t_size(ctx, i)]
                    for i in range(n_tensors(ctx))},
    })
print("RESULT" + json.dumps(out))
"""


def c_loader(*paths: str | Path) -> list[dict[str, Any] | None]:
    """What ggml's `gguf_init_from_file` makes of files, their data loaded; None where it refuses."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, paths)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any] | None] = json.loads(done.stdout.partition("RESULT")[2])
    return found


def reference(path: Path, fill: Callable[[gguf.GGUFWriter], None], arch: str = "llama", **options: Any) -> list[bytes]:
    """The bytes of the files that `gguf.GGUFWriter` makes, in order."""
    writer = gguf.GGUFWriter(path, arch, **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = sorted(path.parent.glob(path.stem + "*.gguf"))
    return [p.read_bytes() for p in names]


def add_quantized(writer: gguf.GGUFWriter, name: str, x: np.ndarray[Any, Any], kind: str) -> None:
    """A tensor encoded by the `gguf` package."""
    dtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(np.asarray(x, np.float32), dtype), raw_dtype=dtype)
