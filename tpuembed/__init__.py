"""Train embedding tables on TPUs with one Keras 3 layer, export them at any size, serve them on CPUs.

Names are loaded when they are first used (PEP 562), so `import tpuembed` does not import TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tpuembed.errors import MissingExtraError
from tpuembed.runtime.tpu import check_keras_backend

if TYPE_CHECKING:
    from tpuembed.backends.input_pipeline import input_options
    from tpuembed.checkpoint import TableInfo, open_checkpoint
    from tpuembed.config import (
        FTRL,
        SGD,
        Adagrad,
        AdagradMomentum,
        Adam,
        FeatureConfig,
        QuantizationConfig,
        TableConfig,
    )
    from tpuembed.errors import TpuEmbedError
    from tpuembed.export import (
        ExportReport,
        compact_version,
        list_versions,
        prune_versions,
        rollback_version,
    )
    from tpuembed.layer import TPUEmbedding
    from tpuembed.live import export_saved_model
    from tpuembed.live.callback import ExportCallback
    from tpuembed.retrieval.export import export_retrieval
    from tpuembed.runtime.tpu import configure_tpu
    from tpuembed.vocabulary import Vocabulary

__version__ = "0.1.0"

_HOME = {
    "FTRL": "tpuembed.config",
    "SGD": "tpuembed.config",
    "Adagrad": "tpuembed.config",
    "AdagradMomentum": "tpuembed.config",
    "Adam": "tpuembed.config",
    "ExportCallback": "tpuembed.live.callback",
    "ExportReport": "tpuembed.export",
    "FeatureConfig": "tpuembed.config",
    "QuantizationConfig": "tpuembed.config",
    "TPUEmbedding": "tpuembed.layer",
    "TableConfig": "tpuembed.config",
    "TableInfo": "tpuembed.checkpoint",
    "TpuEmbedError": "tpuembed.errors",
    "Vocabulary": "tpuembed.vocabulary",
    "compact_version": "tpuembed.export",
    "configure_tpu": "tpuembed.runtime.tpu",
    "export_retrieval": "tpuembed.retrieval.export",
    "export_saved_model": "tpuembed.live",
    "input_options": "tpuembed.backends.input_pipeline",
    "list_versions": "tpuembed.export",
    "open_checkpoint": "tpuembed.checkpoint",
    "prune_versions": "tpuembed.export",
    "rollback_version": "tpuembed.export",
}

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "ExportCallback",
    "ExportReport",
    "FeatureConfig",
    "QuantizationConfig",
    "TPUEmbedding",
    "TableConfig",
    "TableInfo",
    "TpuEmbedError",
    "Vocabulary",
    "__version__",
    "compact_version",
    "configure_tpu",
    "export_retrieval",
    "export_saved_model",
    "input_options",
    "list_versions",
    "open_checkpoint",
    "prune_versions",
    "rollback_version",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'tpuembed' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        check_keras_backend()  # must run before Keras imports its backend
        if error.name not in ("tensorflow", "keras"):
            raise
        raise MissingExtraError(f"tpuembed.{name}", error.name, "tf") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)
