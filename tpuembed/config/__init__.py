"""The configs of tables, features, optimizers and serving: frozen, valid once built, free of TensorFlow."""

from tpuembed.config.optimizers import FTRL, OPTIMIZERS, SGD, Adagrad, AdagradMomentum, Adam, Optimizer, optimizer_from
from tpuembed.config.serialization import feature_config_from_dict, feature_config_to_dict, load_mapping
from tpuembed.config.serving import ServingConfig, ServingFeature, ServingTable
from tpuembed.config.tables import COMBINERS, FeatureConfig, QuantizationConfig, TableConfig

__all__ = [
    "COMBINERS",
    "FTRL",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "FeatureConfig",
    "Optimizer",
    "QuantizationConfig",
    "ServingConfig",
    "ServingFeature",
    "ServingTable",
    "TableConfig",
    "feature_config_from_dict",
    "feature_config_to_dict",
    "load_mapping",
    "optimizer_from",
]
