"""``python -m tests``: everything that must pass before a change lands: lint, types, tests, browser, notebooks.

``--quick`` leaves out the slow tests, the browser and the notebooks. Where there is no Chromium, or playwright and
jupyterlab are not installed, the browser's tests are skipped and say why. Continuous integration calls exactly this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q"]
NBVAL = ["-p", "no:xdist", "--nbval", "--nbval-current-env", "--nbval-sanitize-with", "notebooks/sanitize.cfg"]
STEPS = {
    "lint": [sys.executable, "-m", "ruff", "check", "."],
    "format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "types": [sys.executable, "-m", "mypy"],
    "tests": [*PYTEST, "-m", "not browser", "-n", "2", "tests"],
    "browser": [*PYTEST, "-m", "browser", "tests/browser"],
    "notebooks": [*PYTEST, *NBVAL, "notebooks"],
}
QUICK = {**STEPS, "tests": [*PYTEST, "-m", "not slow", "-n", "2", "tests"]}
del QUICK["notebooks"], QUICK["browser"]


def main() -> int:
    """Run every step, also after one has failed; 1 where any did."""
    failed = []
    for name, command in (QUICK if "--quick" in sys.argv[1:] else STEPS).items():
        print(f"== {name}: {' '.join(command[1:])}", flush=True)
        start = time.monotonic()
        settings = {"PYTHONHASHSEED": "0", "APSI_QUIET": "1"}
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}).returncode
        print(f"== {name}: {'ok' if code == 0 else f'failed ({code})'} in {time.monotonic() - start:.0f} s", flush=True)
        if code:
            failed.append(name)
    print("all good" if not failed else f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
