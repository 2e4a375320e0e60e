"""Checkpoints and their exports that several files read. They are made once in a session, and no test changes them."""

from pathlib import Path

import pytest
import tensorflow as tf

from tests.support import contract_lookups, contract_models
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model


@pytest.fixture(scope="session")
def lookups(tmp_path_factory: pytest.TempPathFactory) -> contract_lookups.Lookups:
    """Return a checkpoint of a layer with two tables, and an export of its lookups."""
    folder = tmp_path_factory.mktemp("lookups")
    tables = {name: TableConfig(*shape, name) for name, shape in contract_lookups.SHAPES.items()}
    layer = TPUEmbedding(
        {"user": FeatureConfig(tables["users"]), "watched": FeatureConfig(tables["videos"])}, "adagrad"
    )
    layer.build({"user": (8,), "watched": (8,)})
    rows = contract_lookups.random_rows()
    for table, variable in layer.embedding_tables.items():
        variable.assign(rows[table.name])
    prefix = Path(tf.train.Checkpoint(layer=layer).write(str(folder / "ckpt-1")))
    export_saved_model(prefix, folder / "rec", serving_config=contract_lookups.CONFIG, workers=1)
    return contract_lookups.Lookups(prefix=prefix, rows=rows, model_dir=folder / "rec")


@pytest.fixture(scope="session")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> contract_models.WholeModel:
    """Return a trained model, a checkpoint of it, and its export."""
    folder = tmp_path_factory.mktemp("whole_model")
    model = contract_models.train()
    prefix = Path(tf.train.Checkpoint(model=model).write(str(folder / "ckpt-1")))
    export_saved_model(prefix, folder / "ranker", model=contract_models.build, workers=1)
    return contract_models.WholeModel(model=model, prefix=prefix, model_dir=folder / "ranker")
