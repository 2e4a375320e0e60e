"""TensorFlow Recommenders' own tests of what we have of it, out of its wheel, run on ours, with as few edits as Keras 3 allows.

docs/compat.md has what passes.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEEL = "tensorflow-recommenders==0.7.7"

LEGACY = ("tf.keras.optimizers.legacy.", "tf.keras.optimizers.")
"""Keras 3 has no legacy optimizers: naming one raises."""
RANK = ("'shape': (),", "'shape': (None,),")
"""Keras 3 compares a batch's rank with its Input's: sparse and ragged ids of [batch, ids] are of shape (None,)."""

SUITES = {
    "tensorflow_recommenders/layers/embedding/tpu_embedding_layer_test.py": (
        13,  # 12 of test_embedding_layer, and unittest's own test_session, skipped
        {
            "from tensorflow_recommenders.layers.embedding import": "from tpuembed.compat.tfrs.layers.embedding import",
            LEGACY[0]: LEGACY[1],
            RANK[0]: RANK[1],
        },
    ),
    "tensorflow_recommenders/experimental/layers/embedding/partial_tpu_embedding_test.py": (
        5,  # 4 and test_session
        {"import tensorflow_recommenders as tfrs": "from tpuembed.compat import tfrs", LEGACY[0]: LEGACY[1]},
    ),
    "tensorflow_recommenders/layers/factorized_top_k_test.py": (
        301,  # 297, and 4 of test_session
        {
            "from tensorflow_recommenders.layers import": "from tpuembed.compat.tfrs.layers import",
            "tf.keras.models.load_model": "tf.saved_model.load",  # Keras 3 loads no SavedModels
        },
    ),
    "tensorflow_recommenders/metrics/factorized_top_k_test.py": (
        7,  # 6 and test_session
        {
            "from tensorflow_recommenders import layers": "from tpuembed.compat.tfrs import layers",
            "from tensorflow_recommenders import metrics": "import tpuembed as metrics",
            # Ours compares by id alone, so it takes no vectors, and its result has names.
            "(True, False)": "(True,)",
            "        query_embeddings=query,": "        queries=query,",
            "        true_candidate_embeddings=true_candidate_embeddings,\n": "",
            "true_candidate_ids=true_candidate_ids if use_candidate_ids else None": "true_ids=true_candidate_ids",
            "          candidates[true_candidate_idx].reshape(1, -1),\n": "",
            "metric.result())": "metric.result().values())",
            "metric.result()[0]": "[*metric.result().values()][0]",
        },
    ),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of TensorFlow Recommenders; nothing of it is installed or kept."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    if done.returncode:
        pytest.skip(f"{WHEEL} cannot be downloaded: {done.stderr.strip()[-300:]}")
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("suite", SUITES)
def test_the_suite_passes_with_the_import_changed(wheel: Path, suite: str, tmp_path: Path) -> None:
    number, edits = SUITES[suite]
    code = zipfile.ZipFile(wheel).read(suite).decode()
    for old, new in edits.items():
        assert old in code
        code = code.replace(old, new)
    (tmp_path / "suite.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "suite.py")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Ran {number} tests" in done.stderr
