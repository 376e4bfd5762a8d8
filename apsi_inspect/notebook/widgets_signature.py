"""The signature view: thin widgets over `SignatureState`, and a field for a secret that keeps nothing.

Contract: what is typed into `SecretField` leaves the widget at once. Its state, as the kernel sends or saves it, has an
empty value at any time; the browser has it between Enter (or leaving the field) and the kernel's answer, and is told to
echo it to nobody. The secret is held for one check and then dropped. `tests/test_widgets.py` enforces this, and
`tests/browser` looks into a saved notebook.
"""

# ipywidgets and traitlets have no types for this
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as w
from traitlets import Unicode

from .state_signature import KEY_FILE, KINDS, NO_KEY, SECRET, SignatureState
from .widgets_base import AUTO, ROW, Message, Panel, Running, button, checkbox, dropdown, text
from .widgets_metadata import standing_alone

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from ..model import ModelFile

_EMPTY, _RECEIVED = "type it, then Enter", "received; held for one check"


class SecretField(w.Password):
    """A password field whose value is handed on and forgotten; `entered` is called with it."""

    value = Unicode("").tag(sync=True, echo_update=False)

    def __init__(self, entered: Callable[[str], None], **more: Any) -> None:
        super().__init__(continuous_update=False, **more)
        self._entered = entered
        self.observe(self._take, "value")

    def _take(self, change: Any) -> None:
        secret = change["new"]
        if secret:
            self.value = ""
            self._entered(secret)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        """The state without what is typed."""
        state = super().get_state(key, drop_defaults)
        if "value" in state:
            state["value"] = ""
        return state


class SignatureView(w.VBox):
    """A badge with the state in words, a choice of key, and a button to verify."""

    def __init__(self, state: SignatureState) -> None:
        self.state = state
        self._secret = ""
        self._enter = False
        self.badge = Panel()
        self.kind = dropdown("Check with", "which key to check the signature with", KINDS)
        self.secret = SecretField(
            self._received,
            description="Secret",
            style=AUTO,
            placeholder=_EMPTY,
            tooltip="a shared secret; it is used for one check and then dropped",
        )
        self.secret.on_msg(self._pressed)
        self.file = text(
            "Key file",
            "path of a file whose content is the key, at least 16 bytes",
            placeholder="~/keys/team.key",
            continuous_update=False,
        )
        self.full = checkbox("digest of the whole too", "slower: also one digest over all the data, after its chunks")
        self.button = button(
            "Verify", "check the digests, and the signature where there is a key", self.verify, button_style="primary"
        )
        self.running = Running("Verifying", state.job)
        self.message = Message()
        self.kind.observe(lambda _: self._draw_fields(), "value")
        state.job.changed = self.draw
        super().__init__(
            [
                w.HBox([self.kind, self.secret, self.file, self.full, self.button], layout=w.Layout(**ROW)),
                self.running.widget,
                self.message.widget,
                self.badge.widget,
            ]
        )
        self._draw_fields()
        self.draw()

    def _draw_fields(self) -> None:
        self.secret.layout.display = None if self.kind.value == SECRET else "none"
        self.file.layout.display = None if self.kind.value == KEY_FILE else "none"
        self._forget()
        self.message.show(None)

    def _forget(self) -> None:
        self._secret, self.secret.placeholder = "", _EMPTY

    def _received(self, secret: str) -> None:
        self._secret, self.secret.placeholder = secret, _RECEIVED
        if self._enter:
            self.verify()

    def _pressed(self, _: Any, content: Any, buffers: Any) -> None:
        """Enter in the field: the message comes before the value, or after it where the field was left before."""
        if content.get("event") == "submit":
            self._enter = not self._secret
            if self._secret:
                self.verify()

    def verify(self) -> None:
        """Start a check with what the fields say; the secret is dropped."""
        kind, self._enter = self.kind.value, False
        given = {SECRET: self._secret, KEY_FILE: self.file.value}.get(kind, "")
        if self.state.job.running:
            return
        self._forget()
        self.message.of(lambda: self.state.verify(kind, given, self.full.value))

    def draw(self) -> None:
        """Show the state."""
        self.running.draw()
        self.badge.show(self.state.parts())
        self.button.disabled = self.state.job.running


def signature_widget(path: ModelFile | str | os.PathLike[str]) -> SignatureView:
    """Verify digests and signature of a model file, as a widget.

    Parameters
    ----------
    path
        A file, an index, a folder, or an opened model.

    Notes
    -----
    A secret that is typed is used for one check and then dropped; until the kernel has answered, the browser's model of
    the field has it (`docs/threat-model.md`).
    """
    view: SignatureView = standing_alone(SignatureView(SignatureState(path)))
    return view


__all__ = ["NO_KEY", "SecretField", "SignatureView", "signature_widget"]
