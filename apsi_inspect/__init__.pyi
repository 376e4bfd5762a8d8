from . import samples as samples
from .errors import (
    ApsiError as ApsiError,
)
from .errors import (
    MissingPackageError as MissingPackageError,
)
from .errors import (
    ModelFileError as ModelFileError,
)
from .errors import (
    TensorNotFoundError as TensorNotFoundError,
)
from .errors import (
    TruncatedFileError as TruncatedFileError,
)
from .errors import (
    UnknownFormatError as UnknownFormatError,
)
from .errors import (
    UnsupportedFileError as UnsupportedFileError,
)
from .errors import (
    ValueRefusedError as ValueRefusedError,
)
from .errors import (
    VerificationError as VerificationError,
)
from .model import Finding as Finding
from .model import ModelFile as ModelFile
from .model import Tensor as Tensor
from .notebook import plots as plots
from .notebook.audit import audit as audit
from .notebook.page import report as report
from .notebook.widgets_error import quant_error_widget as quant_error_widget
from .notebook.widgets_metadata import metadata_widget as metadata_widget
from .notebook.widgets_signature import signature_widget as signature_widget
from .notebook.widgets_units import units_widget as units_widget
from .ops.changes import ConversionReport as ConversionReport
from .ops.compare import compare as compare
from .ops.comparison import Comparison as Comparison
from .ops.convert import convert as convert
from .ops.error import quant_error as quant_error
from .ops.error_table import ErrorTable as ErrorTable
from .ops.gguf import load_gguf as load_gguf
from .ops.gguf import save_gguf as save_gguf
from .ops.hardware import hardware_plan as hardware_plan
from .ops.hardware_report import HardwarePlan as HardwarePlan
from .ops.info import gguf_info as gguf_info
from .ops.info import model_info as model_info
from .ops.info import safetensors_info as safetensors_info
from .ops.load import load_model as load_model
from .ops.load import load_safetensors as load_safetensors
from .ops.onnx import onnx_model as onnx_model
from .ops.open import open as open
from .ops.plan import plan as plan
from .ops.plan_report import Plan as Plan
from .ops.quantize import (
    bf16 as bf16,
)
from .ops.quantize import (
    fp4 as fp4,
)
from .ops.quantize import (
    fp6 as fp6,
)
from .ops.quantize import (
    fp6_e3m2 as fp6_e3m2,
)
from .ops.quantize import (
    fp8 as fp8,
)
from .ops.quantize import (
    fp8_e5m2 as fp8_e5m2,
)
from .ops.quantize import (
    int4 as int4,
)
from .ops.quantize import (
    int8 as int8,
)
from .ops.quantize import (
    quantize as quantize,
)
from .ops.quantize import (
    quantize_model as quantize_model,
)
from .ops.save import save_model as save_model
from .ops.save import save_safetensors as save_safetensors
from .ops.scan import scan as scan
from .ops.survey import stats as stats
from .ops.torch import torch_load as torch_load
from .ops.verify import verify as verify
from .permit import permissions as permissions
from .qtensor import QTensor as QTensor
from .reports import Report as Report
from .table import TensorTable as TensorTable
from .tree import record as record
from .units import Unit as Unit

__version__: str

def load_ipython_extension(ipython: object) -> None: ...
