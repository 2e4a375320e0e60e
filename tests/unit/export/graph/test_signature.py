"""Names that TensorFlow takes for the same in one signature are refused before anything is written: as it decides itself."""

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.messages import refused
from tpuembed import export_saved_model
from tpuembed.errors import ConfigError
from tpuembed.export.graph.signature import check_input_names

PAIRS = [
    ("x", "X"),
    ("ab", "aB"),
    ("a.b", "a_b"),
    ("a-b", "a>b"),
    ("a.b", "A_b"),
    ("a/b", "A/B"),
    ("a/b", "A.B"),
    ("a", "a_1"),
    ("A", "a/b"),
]


def _is_saved(names: tuple[str, ...], folder: Path) -> bool:
    """Whether TensorFlow saves a signature with inputs of these names."""
    specs = {name: tf.TensorSpec([None], tf.int64, name=name) for name in names}

    @tf.function(input_signature=[specs], autograph=False)
    def total(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"total": tf.add_n(list(inputs.values()))}

    try:
        tf.saved_model.save(tf.Module(), str(folder), {"serving_default": total.get_concrete_function()})
    except (ValueError, TypeError):
        return False
    return True


@pytest.mark.parametrize("names", PAIRS, ids="|".join)
def test_what_tensorflow_cannot_tell_apart(names: tuple[str, str], tmp_path: Path) -> None:
    if _is_saved(names, tmp_path):
        check_input_names(names)
        return
    with refused(ConfigError):
        check_input_names(names)


def test_an_export_names_both(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", {"t": random_table(5, 2)})
    config = {"features": {"Watched": {"table": "t"}, "watched": {"table": "t"}}}
    with refused(ConfigError, match="features 'Watched'"):
        export_saved_model(tmp_path / "ckpt", tmp_path / "m", serving_config=config)
    assert not (tmp_path / "m").exists()
