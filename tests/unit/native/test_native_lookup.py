"""Native lookups equal TensorFlow's of the same export, and a brute force in numpy, for every option."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.export.in_process import exports_in_this_process
from tests.support.export.lookups import Case, request, write
from tests.support.messages import refused
from tpuembed.errors import ConfigError, TpuEmbedError
from tpuembed.manifest import Manifest
from tpuembed.native.lookup import _LIBRARY, VARIANTS, NativeLookups, available, refusal, variant
from tpuembed_serving.core.status import plain_message

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=f"native/src/lookup.c is not compiled: {available()}"),
]

Array = npt.NDArray[Any]
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
TINY = np.finfo(np.float32).tiny


class Pair:
    """An export, and both ways to look its rows up. No dataclass: hypothesis would print all rows of a failure."""

    def __init__(self, case: Case, loaded: Any, native: tuple[NativeLookups, ...]) -> None:
        self.case, self.loaded, self.native = case, loaded, native

    def theirs(self, inputs: Mapping[str, Array], signature: str = "serving_default") -> dict[str, Array]:
        given = {name: tf.constant(value) for name, value in inputs.items()}
        return {name: value.numpy() for name, value in self.loaded.signatures[signature](**given).items()}


EXPORTS = [("float32", True, False), ("int8", False, True)]
OTHERS = [("float32", True, True), ("float32", False, False), ("int8", True, False), ("bfloat16", True, False)]
OTHERS += [("bfloat16", False, True), ("float16", True, False), ("float16", False, True)]


@pytest.fixture(
    scope="module",
    params=[*EXPORTS, *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)],
    ids=lambda one: f"{one[0]}{'-weighted' * one[1]}{'-overlay' * one[2]}",
)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    storage, weighted, overlay = request.param
    with exports_in_this_process():
        case = write(tmp_path_factory.mktemp("export"), storage, weighted=weighted, overlay=overlay)
    best = VARIANTS.index(variant())
    native = [NativeLookups(case.manifest, case.path, threads=1, variant=name) for name in VARIANTS[: best + 1]]
    return Pair(case, tf.saved_model.load(str(case.path)), tuple(native))


def brute_force(case: Case, name: str, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return float64 activations, and the sum of |weight x value|, divided alike."""
    spec, rows = case.features[name], case.rows[case.features[name]["table"]].astype(np.float64)
    ids, policy = inputs[name], spec.get("out_of_vocabulary")
    weights = inputs.get(f"{name}_weights", np.ones(ids.shape, np.float32)).astype(np.float64)
    is_inside = (ids >= 0) & (ids < len(rows))
    found = rows[np.where(is_inside, ids, policy if isinstance(policy, int) else 0)]
    if policy == "zeros":
        found = np.where(is_inside[..., None], found, 0.0)
    if spec.get("input") == "id":
        return found, np.abs(found)
    found = np.where((ids != -1)[..., None], found, 0.0)
    if length := spec.get("max_sequence_length"):
        padding = np.zeros((len(ids), length, rows.shape[1]))
        return np.concatenate([found, padding], 1)[:, :length], np.abs(np.concatenate([found, padding], 1))[:, :length]
    weights = np.where(ids != -1, weights, 0.0)
    combiner = spec["combiner"]
    divisors = {"sum": np.ones(len(ids)), "mean": weights.sum(1), "sqrtn": np.sqrt((weights**2).sum(1))}[combiner]
    with np.errstate(all="ignore"):
        products = np.where((ids != -1)[..., None], found * weights[..., None], 0.0)
        scale = np.where(divisors == 0, np.nan, divisors)[:, None]
        total = np.where((divisors == 0)[:, None], 0.0, products.sum(1) / scale)
        return total, np.where((divisors == 0)[:, None], 0.0, np.abs(products).sum(1) / np.abs(scale))


def assert_close(name: str, found: Array, expected: Array, magnitude: Array) -> None:
    """Check a difference of at most 1e-6 of the magnitude, and the same NaN and infinities."""
    finite = np.isfinite(expected) & np.isfinite(magnitude)
    same = found.astype(np.float64) == expected
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
    assert (same | ~np.isfinite(expected) | finite)[~np.isnan(expected)].all(), name
    assert same[np.isinf(expected)].all(), name
    with np.errstate(all="ignore"):
        near = np.abs(found - expected) <= 1e-6 * magnitude + 4 * TINY
    assert near[finite].all(), (name, found, expected)


def is_copied(spec: Mapping[str, Any]) -> bool:
    return spec.get("input") == "id" or bool(spec.get("max_sequence_length"))


@given(seed=st.integers(0, 2**32), batch=st.integers(0, 6), hot=st.sampled_from([0, 1, 3, 4, 5, 9, 40]))
@SETTINGS
def test_named_equals_tensorflow_and_brute_force(pair: Pair, seed: int, batch: int, hot: int) -> None:
    inputs = request(pair.case, np.random.default_rng(seed), batch, hot)
    theirs = pair.theirs(inputs)
    for native in pair.native:
        found = native.named(inputs)
        assert list(found) == list(pair.case.features)
        for name, spec in pair.case.features.items():
            assert found[name].shape == theirs[name].shape
            if is_copied(spec):
                np.testing.assert_array_equal(found[name], theirs[name], err_msg=name)
            expected, magnitude = brute_force(pair.case, name, inputs)
            assert_close(name, found[name], expected, magnitude)
            # TensorFlow's own error is as large.
            finite = np.isfinite(theirs[name])
            np.testing.assert_array_equal(np.isfinite(found[name]), finite, err_msg=name)
            np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(theirs[name]), err_msg=name)
            if batch:
                near = np.abs(found[name][finite] - theirs[name][finite])
                assert (near <= 2e-6 * magnitude[finite] + 8 * TINY).all(), name


@given(seed=st.integers(0, 2**32), batch=st.integers(0, 6), hot=st.sampled_from([0, 1, 2, 7]))
@SETTINGS
def test_packed_has_the_named_outputs_side_by_side(pair: Pair, seed: int, batch: int, hot: int) -> None:
    packing = pair.case.manifest.packing
    if packing.left_out:
        with refused(ConfigError):
            pair.native[0].packed(np.zeros((1, 1), np.int64))
        return
    inputs = request(pair.case, np.random.default_rng(seed), batch, hot, one_width=True)
    matrix = np.concatenate(
        [
            inputs[one.name].reshape(batch, -1) if batch else np.zeros((0, hot if one.columns is None else 1), np.int64)
            for one in packing.inputs
        ],
        1,
    )
    theirs = pair.theirs({"ids": matrix}, "packed")["activations"]
    named = pair.native[-1].named(inputs)
    for native in pair.native:
        found = native.packed(matrix)
        assert found.shape == theirs.shape
        for one in packing.outputs or ():
            part = found[:, one.start : one.stop].reshape(batch, *one.shape)
            np.testing.assert_array_equal(part, named[one.name])
            if is_copied(pair.case.features[one.name]):
                np.testing.assert_array_equal(part, theirs[:, one.start : one.stop].reshape(batch, *one.shape))


def _with_outside(pair: Pair, random: np.random.Generator, batch: int, hot: int, names: list[str]) -> dict[str, Array]:
    inputs = request(pair.case, random, batch, hot, one_width=True)
    for name in names:
        places = random.integers(0, inputs[name].size, 2)
        bad = [-2, 10**6, -(2**63), 2**63 - 1]
        inputs[name].reshape(-1)[places] = random.choice(np.array(bad), 2)
    return inputs


def _theirs(pair: Pair, inputs: Mapping[str, Array], signature: str) -> str:
    for _ in range(
        50
    ):  # groups are checked in parallel: the failed one cancels the others, one of which may be reported
        with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)) as raised:
            pair.theirs(inputs, signature)
        if isinstance(raised.value, tf.errors.InvalidArgumentError):
            break
    message = re.search(r"assertion failed: \[(feature .*?)\]\s", raised.value.message)
    assert message, raised.value.message
    return plain_message(message[1])


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 5), hot=st.sampled_from([1, 3]))
@SETTINGS
def test_the_first_id_outside_is_that_of_the_graph(pair: Pair, seed: int, batch: int, hot: int) -> None:
    """Of one group, the same id; which group comes first, the graph's executor decides."""
    random, native = np.random.default_rng(seed), pair.native[-1]
    groups: dict[Any, list[str]] = {}
    for one, group in zip(native.features, native._groups, strict=True):
        if one.out_of_vocabulary == "error" and one.max_sequence_length in (0, hot):
            groups.setdefault(group, []).append(one.name)
    members = list(groups.values())[int(random.integers(len(groups)))]
    inputs = _with_outside(pair, random, batch, hot, members)
    with pytest.raises(ConfigError) as raised:
        native.named(inputs)
    assert str(raised.value) == _theirs(pair, inputs, "serving_default")
    packing = pair.case.manifest.packing
    if not packing.left_out:
        matrix = np.concatenate([inputs[one.name].reshape(batch, -1) for one in packing.inputs], 1)
        with pytest.raises(ConfigError) as raised:
            native.packed(matrix)
        assert str(raised.value) == _theirs(pair, {"ids": matrix}, "packed")


def test_many_rows_are_checked_feature_by_feature_as_the_graph_does(pair: Pair) -> None:
    """Lists of more than 4 MiB of rows."""
    random, native = np.random.default_rng(0), pair.native[-1]
    inputs = request(pair.case, random, 900, 20, one_width=True)
    inputs["c_error_list"][700, 3], inputs["c_error_list"][800, 1] = 10**6, 10**7
    with pytest.raises(ConfigError) as raised:
        native.named(inputs)
    assert str(raised.value) == _theirs(pair, inputs, "serving_default")


def test_threads_find_the_same_numbers_and_errors(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed.native.lookup._THREADED_BYTES", 100)
    threaded = NativeLookups(pair.case.manifest, pair.case.path, threads=3)
    for batch in (0, 1, 2, 100):
        inputs = request(pair.case, np.random.default_rng(batch), batch, 5)
        for name, value in threaded.named(inputs).items():
            np.testing.assert_array_equal(value, pair.native[-1].named(inputs)[name])
    inputs["a_error_list"] = np.full((100, 3), -5)
    with pytest.raises(ConfigError, match="feature a_error_list: id -5 of row 0 is not in table a"):
        threaded.named(inputs)


def test_inputs_of_any_strides(pair: Pair) -> None:
    inputs = request(pair.case, np.random.default_rng(5), 6, 4)
    strided = {name: np.repeat(value, 2, 0)[::2] for name, value in inputs.items()}
    strided["a_error_list"] = np.asfortranarray(inputs["a_error_list"])
    strided["a_error_id"] = np.flip(np.flip(inputs["a_error_id"]).copy())
    for name, value in pair.native[-1].named(strided).items():
        np.testing.assert_array_equal(value, pair.native[-1].named(inputs)[name])


def test_inputs_that_do_not_fit_are_refused(pair: Pair) -> None:
    native, inputs = pair.native[-1], request(pair.case, np.random.default_rng(5), 6, 4)
    for name, value in (("a_error_id", np.zeros((6, 1), np.int64)), ("a_error_list", np.zeros((6, 1), np.int32))):
        with refused(ConfigError):
            native.named(inputs | {name: value})
    with refused(ConfigError):
        native.named(inputs | {"a_error_list": np.zeros((5, 1), np.int64)})
    if not pair.case.manifest.packing.left_out:
        for columns in (1, 30):
            with refused(ConfigError):
                native.packed(np.zeros((6, columns), np.int64))
        with refused(ConfigError):
            native.packed(np.zeros((6, 9 + 24), np.int64), np.zeros((6, 3), np.float32))
    else:
        with refused(ConfigError):
            weights = next(name for name in inputs if name.endswith("_weights"))
            native.named(inputs | {weights: np.zeros((6, 9), np.float32)})


def test_an_overlay_that_contradicts_itself_fails(pair: Pair, tmp_path: Path) -> None:
    if pair.case.manifest.base is None:
        return
    native = NativeLookups(pair.case.manifest, pair.case.path, threads=1)
    inputs = request(pair.case, np.random.default_rng(0), 6, 4)
    words = np.full(100, (2**30 << 32) + 2**32 - 1, np.int64)  # each row is in the overlay, at a place beyond its end
    for struct in native._structs:
        struct.words = words.ctypes.data
    with refused(TpuEmbedError):
        native.named(inputs)


def test_what_exports_are_refused(pair: Pair, tmp_path: Path) -> None:
    manifest = pair.case.manifest

    def changed(**fields: Any) -> Manifest:
        return dataclasses.replace(
            manifest, features=tuple(dataclasses.replace(one, **fields) for one in manifest.features)
        )

    assert refusal(manifest) == ""
    assert "whole model" in refusal(dataclasses.replace(manifest, features=()))
    assert "its layout is variables" in refusal(dataclasses.replace(manifest, layout="variables"))
    for fields in ({"combiner": "max"}, {"out_of_vocabulary": "drop"}, {"out_of_vocabulary": 10**6}, {"table": "x"}):
        with refused(ConfigError):
            NativeLookups(changed(**fields), pair.case.path)
    with pytest.raises(ConfigError, match=r"whole model"):
        NativeLookups(dataclasses.replace(manifest, features=()), pair.case.path)
    with pytest.raises(ConfigError, match=r"cannot be mapped"):
        NativeLookups(manifest, tmp_path)


def test_the_library_is_that_of_the_source() -> None:
    sources = list((_LIBRARY.parent / "src").glob("*.[ch]"))
    assert sources
    assert all(_LIBRARY.stat().st_mtime >= source.stat().st_mtime for source in sources), f"run `make {_LIBRARY.name}`"
