"""apsi_inspect: open, look at, verify, measure, quantize, convert and sign model weight files.

``import apsi_inspect as ai``, then ``ai.open("model.gguf")``. In a notebook: ``%load_ext apsi_inspect``,
``%apsi_info model.gguf``. Names are loaded on use, so that the import is fast.
"""

from __future__ import annotations

__version__ = "0.1.0"

# public name -> module that has it; `__init__.pyi` says the same to type checkers, a test compares the two
_PUBLIC = {
    "ApsiError": ".errors",
    "Comparison": ".ops.comparison",
    "ConversionReport": ".ops.changes",
    "ErrorTable": ".ops.error_table",
    "Finding": ".model",
    "HardwarePlan": ".ops.hardware_report",
    "MissingPackageError": ".errors",
    "ModelFile": ".model",
    "ModelFileError": ".errors",
    "Plan": ".ops.plan_report",
    "QTensor": ".qtensor",
    "Report": ".reports",
    "Tensor": ".model",
    "TensorNotFoundError": ".errors",
    "TensorTable": ".table",
    "TruncatedFileError": ".errors",
    "Unit": ".units",
    "UnknownFormatError": ".errors",
    "UnsupportedFileError": ".errors",
    "ValueRefusedError": ".errors",
    "VerificationError": ".errors",
    "audit": ".notebook.audit",
    "bf16": ".ops.quantize",
    "compare": ".ops.compare",
    "convert": ".ops.convert",
    "fp4": ".ops.quantize",
    "fp6": ".ops.quantize",
    "fp6_e3m2": ".ops.quantize",
    "fp8": ".ops.quantize",
    "fp8_e5m2": ".ops.quantize",
    "gguf_info": ".ops.info",
    "hardware_plan": ".ops.hardware",
    "int4": ".ops.quantize",
    "int8": ".ops.quantize",
    "load_gguf": ".ops.gguf",
    "load_model": ".ops.load",
    "load_safetensors": ".ops.load",
    "metadata_widget": ".notebook.widgets_metadata",
    "model_info": ".ops.info",
    "onnx_model": ".ops.onnx",
    "open": ".ops.open",
    "permissions": ".permit",
    "plan": ".ops.plan",
    "plots": ".notebook.plots",
    "quant_error": ".ops.error",
    "quant_error_widget": ".notebook.widgets_error",
    "quantize": ".ops.quantize",
    "quantize_model": ".ops.quantize",
    "record": ".tree",
    "safetensors_info": ".ops.info",
    "report": ".notebook.page",
    "samples": ".samples",
    "save_gguf": ".ops.gguf",
    "save_model": ".ops.save",
    "save_safetensors": ".ops.save",
    "scan": ".ops.scan",
    "signature_widget": ".notebook.widgets_signature",
    "stats": ".ops.survey",
    "torch_load": ".ops.torch",
    "units_widget": ".notebook.widgets_units",
    "verify": ".ops.verify",
}

_MODULES = ("plots", "samples")  # public as modules; the others are names in theirs

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = import_module(module, __name__)
    value = found if name in _MODULES else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: object) -> None:
    """``%load_ext apsi_inspect``."""
    from .notebook.magics import load_ipython_extension as load

    load(ipython)
