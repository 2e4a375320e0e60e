"""What `import tpuembed.compat` says where it cannot work."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["tfrs", "keras_rs"])
def test_without_tensorflow_the_command_is_named(module: str) -> None:
    code = "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda n: None if n == 'tensorflow' else find(n)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}import tpuembed.compat.{module}"], capture_output=True, text=True, timeout=120
    )
    last = done.stderr.splitlines()[-1]
    assert last.endswith("tpuembed.compat needs tensorflow, which is not installed: pip install 'tpuembed[tf]'")


def test_another_keras_backend_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tpuembed.compat.tfrs"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "KERAS_BACKEND": "jax"},
    )  # fmt: skip
    assert "KERAS_BACKEND is 'jax'" in done.stderr.splitlines()[-1]


def test_code_that_names_the_librarys_modules_runs_with_the_import_changed() -> None:
    from tpuembed.compat import keras_rs, tfrs

    assert keras_rs.layers.DistributedEmbedding is keras_rs.DistributedEmbedding
    assert keras_rs.layers.TableConfig is keras_rs.TableConfig
    assert keras_rs.layers.FeatureConfig is keras_rs.FeatureConfig
    assert tfrs.layers.embedding.TPUEmbedding is tfrs.TPUEmbedding
    assert tfrs.experimental.layers.embedding.PartialTPUEmbedding is tfrs.PartialTPUEmbedding
    assert tfrs.tpu_embedding_layer is tfrs.layers.embedding.tpu_embedding_layer
    assert tfrs.tpu_embedding_layer.TPUEmbedding is tfrs.TPUEmbedding
    assert tfrs.tpu_embedding_layer.translate_keras_optimizer is tfrs.translate_keras_optimizer


_IMPORTS = """
from tpuembed.compat.tfrs.layers.embedding import tpu_embedding_layer; tpu_embedding_layer.TPUEmbedding
from tpuembed.compat.tfrs.layers.embedding.tpu_embedding_layer import TPUEmbedding, translate_keras_optimizer
from tpuembed.compat.tfrs.experimental.layers.embedding import PartialTPUEmbedding, partial_tpu_embedding
import tpuembed.compat.tfrs.experimental.layers.embedding.partial_tpu_embedding as p; p.PartialTPUEmbedding
from tpuembed.compat.tfrs import layers; layers.embedding.tpu_embedding_layer; layers.factorized_top_k.ScaNN
from tpuembed.compat.tfrs.layers.factorized_top_k import BruteForce, ScaNN, Streaming, TopK
from tpuembed.compat.keras_rs.layers import DistributedEmbedding, FeatureConfig, TableConfig
from tpuembed.compat.keras_rs import layers; layers.DistributedEmbedding
"""


@pytest.mark.nightly
def test_the_librarys_modules_can_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
