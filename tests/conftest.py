"""Shared fixtures. Slow tests are left out unless a marker expression is given (``-m "slow or not slow"``: all)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent / "data"

# The same examples every time; `--hypothesis-profile deep` looks for new ones.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", max_examples=100, deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("deep", max_examples=2_000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("quick")

# Runs a snippet in a fresh process and prints by how many kB its peak memory grew over that of its imports.
_MEASURED = """
import os, sys
import apsi_inspect
from apsi_inspect.errors import ApsiError
from apsi_inspect.ops.open import open as open_model
def peak():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM"))
start = peak()
{code}
print("GREW", peak() - start)
"""


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data."""
    return DATA


@pytest.fixture
def measured() -> Callable[..., tuple[str, float]]:
    """``measured(code, *args, seconds=…)``: what the snippet prints, and the growth of its peak memory in MB."""

    def run(code: str, *args: object, seconds: float = 60, limit_files: int | None = None) -> tuple[str, float]:
        if limit_files is not None:
            limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit_files}, {limit_files}))"
            code = f"import resource\n{limit}\n{code}"
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED.format(code=code), *map(str, args)],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        out, _, grew = done.stdout.rpartition("GREW")
        return out.strip(), int(grew) / 1024

    return run
