"""Bytes laid out anew: deflated members of PyTorch archives, and the limits of what is unpacked."""

from __future__ import annotations

import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from apsi_inspect.errors import ModelFileError
from apsi_inspect.formats import relaid
from apsi_inspect.formats.zip_archive import inflate
from apsi_inspect.ops.open import open as open_model
from apsi_inspect.ops.torch import torch_load

from .torch_zip import file, state_dict, tensor


def deflated(data: bytes, level: int = 1) -> bytes:
    z = zlib.compressobj(level, zlib.DEFLATED, -15)
    return z.compress(data) + z.flush()


def archive_of(path: Path, *arrays: np.ndarray) -> Path:
    """A deflated archive of float32 vectors a0, a1 …"""
    entries = {f"a{i}": tensor(str(i), a.size, [a.size], [1]) for i, a in enumerate(arrays)}
    path.write_bytes(file(state_dict(**entries), {str(i): a.tobytes() for i, a in enumerate(arrays)}, method=8))
    return path


@pytest.mark.parametrize("n", [0, 1, 1 << 16, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1_500_001])
@pytest.mark.parametrize("kind", ["zeros", "random", "mixed"])
def test_inflate(n: int, kind: str) -> None:
    random = np.random.default_rng(n).integers(0, 256 if kind == "random" else 3, n, np.uint8).tobytes()
    data = bytes(n) if kind == "zeros" else random
    packed = deflated(data)
    assert inflate(packed, n, "f", "m") == data
    for wrong in {n + 1, max(n - 1, 0)} - {n}:
        with pytest.raises(ModelFileError, match="does not unpack to its size"):
            inflate(packed, wrong, "f", "m")
    if n:
        with pytest.raises(ModelFileError, match="does not unpack to its size"):
            inflate(packed[:-1], n, "f", "m")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "bomb.pt", np.zeros(20 << 20, np.float32))  # 80 MiB from 80 kB
    with open_model(path) as model:
        assert model["a0"].shape == (20 << 20,)  # it can be looked at
        with pytest.raises(ModelFileError, match=r"data/0.*unpacks from \d+ bytes to 83886080;.*at most 200 times"):
            model["a0"].numpy()
    with pytest.raises(ModelFileError, match="bomb"):
        torch_load(path)


def test_many_small_bombs_count_together(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "bombs.pt", *(np.zeros(5 << 20, np.float32) for _ in range(4)))
    with pytest.raises(ModelFileError, match=r"data/0' with the other deflated members unpacks .* to 83886080"):
        torch_load(path)


def test_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small numbers in the place of the large ones."""
    monkeypatch.setattr(relaid, "INFLATED_LIMITS", ((1000, 20), (10_000, 4)))
    rng = np.random.default_rng(0)
    dense = rng.standard_normal(10_000).astype(np.float32)  # shrinks by a tenth
    assert np.array_equal(torch_load(archive_of(tmp_path / "dense.pt", dense)).a0, dense)
    bits = rng.integers(0, 2, 1000).astype(np.float32)  # 4000 bytes, about a twentieth: below the second limit
    assert np.array_equal(torch_load(archive_of(tmp_path / "bits.pt", bits)).a0, bits)
    bits = rng.integers(0, 2, 10_000).astype(np.float32)
    with pytest.raises(ModelFileError, match="above 10000 bytes at most 4 times"):
        torch_load(archive_of(tmp_path / "more.pt", bits))


def test_unpacking_takes_one_buffer(tmp_path: Path) -> None:
    n = 10 << 20
    path = archive_of(tmp_path / "zeros.pt", np.zeros(n, np.float32))
    torch_load(archive_of(tmp_path / "small.pt", np.zeros(5, np.float32)))  # imports
    tracemalloc.start()
    try:
        tree = torch_load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tree.a0.nbytes == 4 * n
    assert peak < 1.2 * 4 * n
