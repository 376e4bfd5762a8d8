from . import samples as samples
from .errors import (
    ApsiError as ApsiError,
    MissingPackageError as MissingPackageError,
    ModelFileError as ModelFileError,
    TensorNotFoundError as TensorNotFoundError,
    TruncatedFileError as TruncatedFileError,
    UnknownFormatError as UnknownFormatError,
    UnsupportedFileError as UnsupportedFileError,
    ValueRefusedError as ValueRefusedError,
    VerificationError as VerificationError,
)
from .model import Finding as Finding, ModelFile as ModelFile, Tensor as Tensor
from .ops.info import gguf_info as gguf_info, model_info as model_info, safetensors_info as safetensors_info
from .ops.load import load_model as load_model, load_safetensors as load_safetensors
from .ops.open import open as open
from .ops.quantize import (
    bf16 as bf16,
    fp4 as fp4,
    fp6 as fp6,
    fp6_e3m2 as fp6_e3m2,
    fp8 as fp8,
    fp8_e5m2 as fp8_e5m2,
    int4 as int4,
    int8 as int8,
    quantize as quantize,
    quantize_model as quantize_model,
)
from .ops.save import save_model as save_model, save_safetensors as save_safetensors
from .ops.verify import verify as verify
from .qtensor import QTensor as QTensor
from .report import Report as Report
from .ops.survey import stats as stats
from .table import TensorTable as TensorTable
from .tree import record as record
from .units import Unit as Unit

__version__: str

def load_ipython_extension(ipython: object) -> None: ...
