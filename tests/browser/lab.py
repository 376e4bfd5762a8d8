"""A JupyterLab of our own on 127.0.0.1, a headless Chromium, and a notebook page that writes down what goes wrong.

Everything lives in a temporary folder: configuration, settings, runtime files, the notebook, the browser's profile.
News, update checks and the extension manager are off; the browser resolves no name at all, every request is recorded.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Playwright, ViewportSize

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-default-apps --disable-extensions"
    " --no-proxy-server --disable-dev-shm-usage"
).split()
NO_NAMES = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "checkForUpdates": False,
        "fetchNews": "false",
        "doNotDisturbMode": True,
    },
    "@jupyterlab/extensionmanager-extension:plugin": {"enabled": False, "disclaimed": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": True},  # the hardest case for a secret
}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
VIEWPORT: ViewportSize = {"width": 1280, "height": 1000}
LIMIT = 120_000  # milliseconds that anything may take: two busy cores and a first compilation
# What JupyterLab itself writes to the console; nothing of ours may be added here.
KNOWN: tuple[str, ...] = ()


def chromium() -> str | None:
    """The browser: of APSI_CHROMIUM, else the system's."""
    return os.environ.get("APSI_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def missing() -> str | None:
    """Why the browser tests cannot run here; None: they can."""
    from importlib.util import find_spec

    for package in ("playwright", "jupyterlab"):
        if find_spec(package) is None:
            return f"{package} is not installed: pip install -e '.[browser]'"
    return None if chromium() else "there is no chromium: apt-get install chromium, or set APSI_CHROMIUM"


class Lab:
    """A running JupyterLab."""

    def __init__(self, folder: Path) -> None:
        self.root, self.token = folder / "notebooks", secrets.token_hex(16)
        self.root.mkdir()
        names = ("config", "data", "runtime", "settings", "workspaces", "home", "ipython")
        for name in names:
            (folder / name).mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
            "APSI_QUIET": "1",
        }
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self.port,
            "ServerApp.port_retries": 0,
            "ServerApp.root_dir": self.root,
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "IdentityProvider.token": self.token,
            "LabApp.news_url": "None",
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "LabApp.extension_manager": "readonly",
        }
        command = [sys.executable, "-m", "jupyterlab", *(f"--{k}={v}" for k, v in options.items())]
        self.log = folder / "lab.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.root)
        self._await()
        for plugin, values in SETTINGS.items():
            self.set(plugin, values)

    def _await(self) -> None:
        end = time.monotonic() + 180
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.call("GET", "/api/status")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()[-3000:]}")

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """A request to the server."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def set(self, plugin: str, values: dict[str, Any]) -> None:
        """Settings of a plugin."""
        self.call("PUT", f"/lab/api/settings/{plugin}", {"raw": json.dumps(values)})

    def write(self, name: str, cells: list[str], html: str | None = None) -> Path:
        """A notebook of code cells; `html` is the output of the last one, which nobody has trusted."""
        import nbformat

        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=kernel)
        if html is not None:
            shown = nbformat.v4.new_output("display_data", {"text/html": html, "text/plain": "in words"})
            notebook.cells[-1].outputs.append(shown)
        path = self.root / name
        nbformat.write(notebook, path)
        return path

    def close(self) -> None:
        """Stop the server and its kernels."""
        try:
            self.call("POST", "/api/shutdown")
            self.process.wait(60)
        finally:
            self.process.kill()


class Notebook:
    """A notebook open in the browser."""

    def __init__(self, lab: Lab, context: BrowserContext, path: Path, theme: str = "light") -> None:
        lab.set("@jupyterlab/apputils-extension:themes", {"theme": THEMES[theme]})
        self.lab, self.path, self.theme = lab, path, theme
        self.count = len(json.loads(path.read_text())["cells"])
        self.page: Page = context.new_page()
        self.page.set_viewport_size(VIEWPORT)
        self.page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        self.page.set_default_timeout(LIMIT)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(f"page error: {error}"))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("websocket", lambda socket: self._asked(socket.url))
        self.page.goto(f"{lab.url}/doc/tree/{path.name}?token={lab.token}")
        cells = ".jp-NotebookPanel .jp-CodeCell"  # they come one after the other; a cell that is not there is not run
        self.page.wait_for_function(f"n => document.querySelectorAll('{cells}').length >= n", arg=self.count)
        self.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(k in message.text for k in KNOWN):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname != "127.0.0.1":
            self.elsewhere.append(url)

    def run_all(self) -> None:
        """Run every cell, with the keyboard, and wait for the last one's prompt to have its number."""
        self.page.locator(".jp-CodeCell").first.click()
        for _ in range(self.count):
            self.page.keyboard.press("Shift+Enter")
        numbered = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].filter(p => /\\d/.test(p.innerText))"
        self.page.wait_for_function(f"n => {numbered}.length >= n", arg=self.count)

    @property
    def view(self) -> Locator:
        """The last of our views."""
        return self.page.locator(".apsi-w.apsi-top").last

    def save(self) -> dict[str, Any]:
        """Save the notebook with its widget state; what is in the file."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.locator(".jp-NotebookPanel").click(position={"x": 4, "y": 300})
        self.page.keyboard.press("Control+s")
        end = time.monotonic() + 30
        while time.monotonic() < end:
            self.page.wait_for_timeout(200)
            text = self.path.read_text()
            if self.path.stat().st_mtime_ns != before and text.endswith("}\n"):  # else it is being written
                saved: dict[str, Any] = json.loads(text)
                return saved
        raise AssertionError("the notebook was not saved")

    def shot(self, name: str) -> None:
        """A picture of the view, where APSI_SCREENSHOTS names a folder."""
        folder = os.environ.get("APSI_SCREENSHOTS")
        if folder:
            self.page.set_viewport_size({"width": 1280, "height": 1700})
            self.page.wait_for_timeout(300)
            self.view.screenshot(path=Path(folder) / f"{name}_{self.theme}.png")

    def close(self) -> None:
        """Close the page and stop its kernel, which else competes with the next one."""
        self.page.close()
        for session in json.loads(self.lab.call("GET", "/api/sessions")):
            if session["path"] == self.path.name:
                self.lab.call("DELETE", f"/api/sessions/{session['id']}")


def context(browser: Browser) -> BrowserContext:
    """What the pages share: JupyterLab's scripts are fetched once."""
    return browser.new_context(viewport=VIEWPORT, device_scale_factor=1.5)


def launch(playwright: Playwright) -> Browser:
    """A headless Chromium with an empty profile."""
    return playwright.chromium.launch(executable_path=chromium(), headless=True, args=[*FLAGS, NO_NAMES])
