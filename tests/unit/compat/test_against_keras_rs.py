"""One model, one data set, with the import changed: what keras-rs' own DistributedEmbedding trained and predicted.

keras-rs leaves tables off the TPU to the model's optimizer, which updates every row; here each table has that optimizer.
"""

from typing import Any

import numpy as np
import pytest

from tests.golden import generate_keras_rs_training as golden
from tpuembed.compat import keras_rs


@pytest.fixture(params=list(golden.OPTIMIZERS))
def runs(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """(our model, what it did, what keras-rs' did)."""
    model = golden.Model(keras_rs, golden.OPTIMIZERS[request.param])
    return model, golden.trained(model, request.param), np.load(golden.FOLDER / f"{request.param}.npz")


@pytest.mark.sampled(1)
def test_it_looks_up_learns_and_predicts_as_keras_rs(runs: tuple[Any, Any, Any]) -> None:
    model, found, truth = runs
    np.testing.assert_allclose(found["before"], truth["before"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["losses"], truth["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["predictions"], truth["predictions"], rtol=1e-4, atol=1e-5)
    begun = golden.start()
    for name, rows in model.embedding_layer.get_embedding_tables().items():
        assert np.abs(truth[name] - begun[name]).max() > 0.1
        np.testing.assert_allclose(rows, truth[name], rtol=0, atol=1e-5, err_msg=name)
