"""`onnx_model`: an ONNX model as its parameters, its metadata and its graph, which can be run where a runtime is there.

Contract: looking needs no package; calling uses onnxruntime, else onnx's reference evaluator (extra ``onnx``).
`tests/test_onnx_model.py` compares results with both.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..display import Displayable
from ..errors import MissingPackageError, ModelFileError, UnknownFormatError, UnsupportedFileError, visible
from ..formats.onnx_graph import Graph
from ..formats.protobuf import Wire
from ..listing import one_line
from ..permit import is_url
from ..tree import record
from .lazy import Later, LazyRecord
from .onnx_inputs import feeds_of, guarded
from .open import open as open_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..model import ModelFile, Tensor


class OnnxModel(Displayable):
    """An ONNX model.

    Attributes
    ----------
    model
        The opened file: a Mapping from names to tensors.
    params
        A record from tensor names to arrays, which are read when they are asked for; the codes of a quantized weight as
        the float32 values they stand for, without their scales.
    metadata
        The model's own key-value pairs, a record.
    graph
        A record: ``name``, ``inputs`` and ``outputs`` (name -> type and shape in words), ``nodes`` (how many),
        ``operators`` (name -> how many), ``opsets`` (domain -> version), ``ir_version``, ``producer``.

    Calling it runs the model: ``outputs = m(x)`` or ``m(input_name=x)``; one array where the model has one output, else
    a record of arrays.
    """

    __slots__ = ("_run", "graph", "metadata", "model", "params")

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        aside = {name for affine in model.affine.values() for name in affine.companions}
        self.params = LazyRecord((n, Later(_maker(model[n]))) for n in model if n not in aside)
        self.metadata = record(model.metadata)
        self.graph = _summary(model)
        self._run: Callable[[dict[str, Any]], list[Any]] | None = None

    def __repr__(self) -> str:
        return one_line(self.model).replace("<ModelFile", "<OnnxModel", 1)

    def _parts(self) -> Any:
        return self.model._parts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on its inputs, by position or by name.

        Raises
        ------
        ValueRefusedError
            An input is missing, not one of the model's, or of another type or shape than the graph declares; or the
            runtime cannot run the model on them.
        MissingPackageError
            Neither onnxruntime nor onnx is installed.
        """
        feeds = feeds_of(self.graph.inputs, args, kwargs)
        if self._run is None:
            self._run = _runner(self.model.path)
        outputs = self._run(feeds)
        if len(outputs) == 1:
            return outputs[0]
        return record(zip(self.graph.outputs, outputs, strict=True))


def _maker(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    def make() -> NDArray[Any]:
        values = tensor.numpy()
        values.flags.writeable = False
        return values

    return make


def _summary(model: ModelFile) -> record:
    """The graph in a record, from the file's description."""
    graph = Graph(Wire(model.sources[0]))
    weights = {found.name for found in graph.tensors}  # before IR 4 they stand among the inputs
    return record(
        name=model.facts.get("graph", ""),
        inputs=record((k, v) for k, v in graph.inputs if k not in weights),
        outputs=record(graph.outputs),
        nodes=model.facts["nodes"],
        operators=record(graph.operators),
        opsets=record(graph.opsets),
        ir_version=model.facts.get("ir version"),
        producer=" ".join(str(model.facts[k]) for k in ("producer", "producer version") if k in model.facts),
    )


def _runner(path: str) -> Callable[[dict[str, Any]], list[Any]]:
    """A function that runs the model at `path`."""
    if is_url(path):
        raise UnsupportedFileError(path, "is behind a URL; a file on disk is needed to run it", hint="download it")
    try:
        import onnxruntime
    except ImportError:
        return _reference(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # quantized weights are computed with in float32, as the model says, not with activations rounded to int8 too
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    errors = _errors_of()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except errors as exc:
        raise ModelFileError(path, f"onnxruntime cannot run it: {visible(str(exc), 300)}") from None
    return guarded(lambda feeds: list(session.run(None, feeds)), "onnxruntime", errors)


def _errors_of() -> tuple[type[Exception], ...]:
    """The exceptions of onnxruntime, which have no common class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = tuple(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))
    return (*own, RuntimeError, ValueError)


def _reference(path: str) -> Callable[[dict[str, Any]], list[Any]]:
    try:
        import onnx
        from onnx.reference import ReferenceEvaluator
    except ImportError as exc:
        raise MissingPackageError("onnxruntime", "running an ONNX model", "onnx") from exc
    evaluator = ReferenceEvaluator(onnx.load(path))
    errors = (RuntimeError, ValueError, TypeError, IndexError, KeyError, NotImplementedError)
    return guarded(lambda feeds: list(evaluator.run(None, feeds)), "onnx's evaluator", errors)


def onnx_model(path: str | os.PathLike[str]) -> OnnxModel:
    """Open an ONNX model to look at and to run.

    Parameters
    ----------
    path
        An ``.onnx`` file; files of external data stand beside it.

    Returns
    -------
    OnnxModel
        With ``.params``, ``.metadata`` and ``.graph``; call it to run it.

    Raises
    ------
    OSError, ModelFileError
        As `open`.
    """
    model = open_model(path)
    if model.format != "onnx":
        model.close()
        raise UnknownFormatError(model.path, f"is {model.format}, ONNX was expected", hint="use open")
    return OnnxModel(model)
