"""serving_config: what each key of a feature means, against numpy."""

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_lookups import FEATURES, SHAPES, Lookups, call, draw, load, look_up

BATCH = 17


@pytest.fixture(scope="module")
def loaded(lookups: Lookups) -> Any:
    return load(lookups.version)


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    return draw(FEATURES, BATCH, seed=1)


@pytest.fixture(scope="module")
def found(loaded: Any, given: dict[str, Any]) -> dict[str, Any]:
    return call(loaded, given)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_looked_up_as_in_numpy(
    lookups: Lookups, given: dict[str, Any], found: dict[str, Any], name: str
) -> None:
    spec = FEATURES[name]
    wanted = look_up(spec, lookups.rows[spec["table"]], given[name], given.get(f"{name}_weights"))
    assert found[name].dtype == np.float32
    assert found[name].shape == wanted.shape
    np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


def test_the_signature_has_the_features_names_types_and_shapes(loaded: Any) -> None:
    signature = loaded.signatures["serving_default"]
    inputs = {
        name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.structured_input_signature[1].items()
    }
    wanted: dict[str, Any] = {}
    for name, spec in FEATURES.items():
        wanted[name] = (tf.int64, [None] if spec.get("input") == "id" else [None, None])
        if spec.get("weighted"):
            wanted[f"{name}_weights"] = (tf.float32, [None, None])
    assert inputs == wanted
    outputs = {name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.structured_outputs.items()}
    for name, spec in FEATURES.items():
        dim, length = SHAPES[spec["table"]][1], spec.get("max_sequence_length", 0)
        assert outputs.pop(name) == (tf.float32, [None, length, dim] if length else [None, dim])
    assert not outputs


def test_serialized_examples_get_the_same_answers(loaded: Any, given: dict[str, Any], found: dict[str, Any]) -> None:
    signature = loaded.signatures["serving_examples"].structured_input_signature[1]
    assert {name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.items()} == {
        "examples": (tf.string, [None])
    }
    examples = np.array([_example(given, row) for row in range(BATCH)], object)
    again = call(loaded, {"examples": examples}, "serving_examples")
    assert again.keys() == found.keys()
    for name, value in found.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def _example(given: dict[str, Any], row: int) -> bytes:
    """Return one example as a serialized tf.train.Example, whose lists have no padding."""
    made: dict[str, Any] = {}
    for name, spec in FEATURES.items():
        ids = np.atleast_1d(given[name][row])
        # Padding before another id is a place in a sequence, so it stays.
        kept = ids != -1 if spec.get("input") != "id" and "max_sequence_length" not in spec else np.ones(len(ids), bool)
        made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=ids[kept]))
        if spec.get("weighted"):
            weights = given[f"{name}_weights"][row][kept]
            made[f"{name}_weights"] = tf.train.Feature(float_list=tf.train.FloatList(value=weights))
    return bytes(tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString())


def test_an_example_has_as_many_weights_as_ids(loaded: Any, given: dict[str, Any]) -> None:
    example = tf.train.Example.FromString(_example(given, 1))
    example.features.feature["follows_weights"].float_list.value.append(1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many values of follows_weights as of follows"):
        call(loaded, {"examples": np.array([example.SerializeToString()], object)}, "serving_examples")


@pytest.mark.parametrize(
    ("name", "ids", "outside"),
    [
        ("user", [50], "id 50 of row 0 is not in table users"),
        ("user", [-1], "id -1 of row 0 is not in table users"),
        ("watched", [[3, 40]], "id 40 of row 0 is not in table videos"),
        ("history", [[-2, 3]], "id -2 of row 0 is not in table videos"),
    ],
)
def test_an_id_outside_its_table_fails_the_request_and_is_named(loaded: Any, name: str, ids: Any, outside: str) -> None:
    inputs = {key: value[1:] for key, value in draw(FEATURES, 2).items()} | {name: ids}

    def ask() -> None:
        for _ in range(10):
            # TensorFlow stops the other lookups, and may tell of that first.
            with contextlib.suppress(tf.errors.CancelledError):
                call(loaded, inputs)

    with pytest.raises(tf.errors.InvalidArgumentError, match=f"feature {name}: {outside}"):
        ask()


def test_lists_of_any_width_and_an_empty_batch(loaded: Any, lookups: Lookups) -> None:
    inputs = draw(FEATURES, 3)
    inputs["watched"] = np.array([[1] * 50, [-1] * 50, [39] * 50])
    inputs["seen"] = np.zeros((3, 0), np.int64)
    found = call(loaded, inputs)
    videos = lookups.rows["videos"]
    np.testing.assert_allclose(found["watched"], [videos[1], np.zeros(6), videos[39]], rtol=1e-5)
    np.testing.assert_array_equal(found["seen"], np.zeros((3, 6)))
    none = call(loaded, {name: value[:0] for name, value in inputs.items()})
    shapes = {name: (0, *value.shape[1:]) for name, value in found.items()}
    assert {name: value.shape for name, value in none.items()} == shapes
