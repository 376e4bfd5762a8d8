"""Messages say what, where and what to do, on one line, whatever the file's names hold."""

from __future__ import annotations

import pickle

import pytest

from apsi_inspect import errors
from apsi_inspect.errors import (
    ApsiError,
    MissingPackageError,
    ModelFileError,
    TensorNotFoundError,
    TruncatedFileError,
    UnknownFormatError,
    UnsupportedFileError,
    ValueRefusedError,
    brief,
    quote,
    visible,
)

HOSTILE = ["\n", "\x1b[2J", "\x07", "\x9b1m", "\u202e", "\u200b", "\ufeff", "\u2028", "\U000e0041", "\ud800", "\0"]


def test_the_tree() -> None:
    for kind in (UnknownFormatError, TruncatedFileError, UnsupportedFileError):
        assert issubclass(kind, ModelFileError)
    assert issubclass(ModelFileError, ApsiError)
    assert issubclass(TensorNotFoundError, KeyError)
    assert issubclass(ValueRefusedError, ValueError)
    assert issubclass(MissingPackageError, ImportError)
    drawn = errors.__doc__ or ""
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, Exception):
            assert issubclass(found, ApsiError)
            assert name in drawn


def test_message() -> None:
    error = ModelFileError("a.gguf", "is short", "tensor 'x'", "fetch it again")
    assert str(error) == "a.gguf: tensor 'x': is short (fetch it again)"
    assert str(ModelFileError("a.gguf", "is short")) == "a.gguf: is short"
    assert (error.file, error.reason, error.where, error.hint) == ("a.gguf", "is short", "tensor 'x'", "fetch it again")


@pytest.mark.parametrize("bad", HOSTILE, ids=ascii)
def test_hostile_text_is_escaped(bad: str) -> None:
    for text in (visible(f"a{bad}b"), quote(f"a{bad}b"), str(ModelFileError(f"a{bad}b", "x"))):
        assert bad[0] not in text
        assert text.isprintable()
        text.encode("utf-8")
    assert str(TensorNotFoundError(f"a{bad}b", f"f{bad}", [f"n{bad}"])).isprintable()


def test_values_of_any_kind_in_a_message() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert brief(nested) == "something nested very deeply"
    while nested:  # taken apart by hand: freeing it level by level is deep too
        nested = nested.pop()  # type: ignore[assignment]
    assert brief([1, "a\x1b"]) == "[1, 'a\\x1b']"
    assert brief("\x1b") == "\\x1b"
    assert len(brief(list(range(10**5)))) <= 80
    assert "\x1b" not in str(ModelFileError("f", "\x1b", "\x1b", "\x1b"))


def test_harmless_text_stays() -> None:
    for text in ("größe.Δ", "層.0.重み", "z😀", "a b", "C:\\x", "é", "naïve ☃"):
        assert visible(text) == text


def test_cut_in_the_middle() -> None:
    assert visible("a" * 50 + "z" * 50, 30) == "a" * 20 + "…" + "z" * 9
    assert len(quote("x" * 10**6)) <= 82
    assert visible("abc", 3) == "abc"


def test_html_is_escaped() -> None:
    page = ModelFileError("<script>x</script>", "a & b")._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a &amp; b" in page


def test_near_names() -> None:
    error = TensorNotFoundError("blk.0.w", "m.gguf", ["blk.0.W"])
    assert str(error) == "m.gguf: no tensor 'blk.0.w'; did you mean 'blk.0.W'?"


def test_missing_package() -> None:
    assert "pip install 'apsi-inspect[torch]'" in str(MissingPackageError("torch", "reading it", "torch"))
    assert "pip install lz4" in str(MissingPackageError("lz4", "reading it"))


@pytest.mark.parametrize(
    "error",
    [
        ModelFileError("f", "r", "w", "h"),
        TruncatedFileError("f", "r"),
        TensorNotFoundError("n", "f", ["m"]),
        ValueRefusedError("no"),
        MissingPackageError("torch", "this", "torch"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_travel_between_processes(error: ApsiError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
