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
)
from .model import Finding as Finding, ModelFile as ModelFile, Tensor as Tensor
from .ops.info import gguf_info as gguf_info, model_info as model_info, safetensors_info as safetensors_info
from .ops.open import open as open
from .ops.survey import stats as stats
from .table import TensorTable as TensorTable
from .tree import record as record
from .units import Unit as Unit

__version__: str

def load_ipython_extension(ipython: object) -> None: ...
