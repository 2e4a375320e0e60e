"""Whole models whose lookups are on several servers answer as one server with everything does."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.export import named_model, whole_model
from tests.support.serving.doubles import wait_for
from tests.support.serving.shards import FEATURES, Cluster, Trained, requests
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_model, export_saved_model, export_shards

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("exports_in_this_process"),
    pytest.mark.filterwarnings("ignore:no requests to warm up", "ignore:Leaving out the signature serving_examples"),
]
KINDS: dict[str, ModuleType] = {"ids": whole_model, "names": named_model}


class Served:
    """A model on one server's export, and on shards with a front."""

    def __init__(self, kind: ModuleType, folder: Path, stack: ExitStack, **sharding: Any) -> None:
        self.draw = kind.draw
        model = kind.build()
        path = tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
        self.whole = export_model(model, folder / "m").path
        self.report = export_shards(path, folder / "s", model=kind.build, **sharding)
        self.cluster = Cluster(folder / "s", folder, stack, 1, "--rest-timeout-ms", "60000")

    def check(self, seed: int, batch: int, hot: int, tolerance: float = 0) -> None:
        inputs = self.draw(np.random.default_rng(seed), batch, hot)
        wanted = capi.predict(self.whole, inputs)
        version, found = self.cluster.ask(inputs)
        assert (version, found.keys()) == (1, wanted.keys())
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module", params=["ids", pytest.param("names", marks=pytest.mark.nightly)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(KINDS[request.param], tmp_path_factory.mktemp("served"), stack, shards=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("batch", "hot"), [(1, 1), (5, 4), (3, 0), (0, 2), (200, 3)])
def test_a_front_answers_as_one_server(served: Served, batch: int, hot: int) -> None:
    served.check(batch + hot, batch, hot)


def test_it_says_when_it_is_ready(served: Served) -> None:
    """The lines came with the next version of the front."""
    wait_for(lambda: "docs: " in served.cluster.front.log)
    assert "ready: " in served.cluster.front.log


@pytest.mark.parametrize("served", ["ids"], indirect=True)
def test_with_several_workers_it_is_ready_when_the_shards_are(served: Served) -> None:
    with ExitStack() as stack:
        for servers in served.cluster.servers.values():
            servers[0].process.send_signal(signal.SIGSTOP)
            stack.callback(servers[0].process.send_signal, signal.SIGCONT)
        front = served.cluster.another_front(stack, "--workers", "2")
        wait_for(lambda: " is available after " in front.log)
        time.sleep(1)
        assert "ready: " not in front.log
        assert front.request("GET", "/readyz")[0] == 503
        for servers in served.cluster.servers.values():
            servers[0].process.send_signal(signal.SIGCONT)
        wait_for(lambda: f"ready: {front.model_url}" in front.log)
        assert front.request("GET", "/readyz")[0] == 200


def test_the_tables_are_on_the_shards_alone(served: Served) -> None:
    assert served.report.front is not None
    assert len(served.report.shards) == 2
    front, sizes = served.report.path / "front" / "1", []
    for folder in (front, *(served.report.path / shard.name / "1" for shard in served.report.shards)):
        sizes.append(sum(path.stat().st_size for path in folder.rglob("*.data-*")))
    assert sizes[0] < min(sizes[1:])


def test_ids_outside_their_table_fail_with_its_message(served: Served) -> None:
    for seed in range(3):
        inputs = served.draw(np.random.default_rng(seed), 6, 4, bad=0.5)
        with pytest.raises(capi.TensorFlowError) as wanted:
            capi.predict(served.whole, inputs)
        with pytest.raises(grpc.RpcError) as caught:
            served.cluster.ask(inputs)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert " is not in " in caught.value.details(), (caught.value.details(), str(wanted.value))


def test_metadata_is_that_of_the_whole_model(served: Served) -> None:
    definition = tf.saved_model.load(str(served.whole)).signatures["serving_default"]
    status, found = served.cluster.front.request("GET", f"{served.cluster.front.path}/metadata")
    assert status == 200
    for name, spec in definition.structured_input_signature[1].items():
        assert f'"{name}"'.encode() in found, spec
    for name in definition.structured_outputs:
        assert f'"{name}"'.encode() in found


def test_wrong_inputs_are_refused_by_the_front(served: Served) -> None:
    inputs = served.draw(np.random.default_rng(1), 3, 2)
    first = next(iter(inputs))
    for wrong in ({name: value for name, value in inputs.items() if name != first}, {**inputs, "other": np.zeros(3)}):
        with pytest.raises(grpc.RpcError) as caught:
            served.cluster.ask(wrong)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_split_tables_of_a_whole_model_add_up(tmp_path: Path) -> None:
    with ExitStack() as stack:
        split = {"a_mean": 2, "c_sqrtn": 3, "d_mean": 2}
        served = Served(whole_model, tmp_path, stack, shards=3, split=split)
        assert sum("c_sqrtn" in shard.tables for shard in served.report.shards) == 3
        for seed, (batch, hot) in enumerate([(1, 1), (7, 4), (3, 0), (64, 5)]):
            served.check(seed, batch, hot, 1e-5)
        test_ids_outside_their_table_fail_with_its_message(served)


def test_split_tables_of_lookups_add_up(tmp_path: Path) -> None:
    trained, config = Trained(tmp_path), {"features": FEATURES}
    export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=3, split={"c": 3, "a": 2, "b": 2})
    whole = export_saved_model(trained.paths[0], tmp_path / "m", serving_config=config).path
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack)
        for seed in range(4):
            inputs = requests(np.random.default_rng(seed), 1 + 9 * seed)
            _, found = cluster.ask(inputs)
            for name, value in capi.predict(whole, inputs).items():
                np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
        for name, value in (("one", np.array([3, 40])), ("listed", np.array([[3, -1], [-1, 41]]))):
            inputs = {**requests(np.random.default_rng(1), 2), name: value}
            status, reply = cluster.front.predict(
                {
                    "inputs": {
                        key: [[one.decode() for one in row] for row in found]
                        if found.dtype == object
                        else found.tolist()
                        for key, found in inputs.items()
                    }
                }
            )
            assert (status, f"feature {name}: id {value.max()} of row 1 is not in table a" in reply["error"]) == (
                400,
                True,
            )


def weights_by_name(**_: Any) -> Any:
    """A model with a feature that is called as the weights of another."""
    keras.utils.set_random_seed(3)
    inputs = {name: keras.Input((None,), dtype="int64", ragged=True, name=name) for name in ("i", "j")}
    tables = {name: TableConfig(40, 4, f"of_{name}", combiner="sum") for name in ("x", "x_weights")}
    layer = TPUEmbedding({name: FeatureConfig(table) for name, table in tables.items()}, optimizer="sgd", name="layer")
    found = layer({"x": inputs["i"], "x_weights": inputs["j"]})
    return keras.Model(
        inputs, {f"{name}_out": keras.layers.Identity(name=f"{name}_out")(value) for name, value in found.items()}
    )


@pytest.mark.parametrize("sharding", [{"shards": 1}, {"shards": 2, "split": {"of_x": 2}}])
def test_a_feature_that_is_called_as_weights_is_none(tmp_path: Path, sharding: dict[str, Any]) -> None:
    with ExitStack() as stack:
        kind: Any = SimpleNamespace(build=weights_by_name, draw=None)
        served = Served(kind, tmp_path, stack, **sharding)
        for width in (2, 3):
            inputs = {"i": np.array([[1, 2], [3, -5]]), "j": np.arange(2 * width).reshape(2, width)}
            _, found = served.cluster.ask(inputs)
            for name, value in capi.predict(served.whole, inputs).items():
                np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_a_front_of_another_export_is_refused(served: Served, tmp_path: Path) -> None:
    model = whole_model.build(7)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    if "price" not in served.draw(np.random.default_rng(1), 1, 1):
        pytest.skip("one model is enough")
    export_shards(path, tmp_path / "s", model=whole_model.build, shards=2)
    with ExitStack() as stack:
        front = served.cluster.another_front(stack, front=str(tmp_path / "s" / "front"))
        body = {"instances": [{"price": [1.0, 2.0]}]}
        wait_for(lambda: "of the export" in front.predict(body)[1]["error"])  # it is loaded, and the shards are polled
        assert front.predict(body)[0] == 503  # no fault of the client


def test_versions_of_fronts_move_under_load_and_no_answer_mixes_two(tmp_path: Path) -> None:
    models = [whole_model.build(seed) for seed in (1, 2)]
    paths = [tf.train.Checkpoint(model=model).write(str(tmp_path / f"ckpt-{n}")) for n, model in enumerate(models)]
    inputs = whole_model.draw(np.random.default_rng(3), 8, 4)
    wanted = [capi.predict(export_model(model, tmp_path / "m").path, inputs) for model in models]
    export_shards(paths[0], tmp_path / "s", model=whole_model.build, shards=3)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack, 2)

        def check(version: int, found: dict[str, Any]) -> None:
            for name, value in wanted[version - 1].items():
                what = f"{name} of version {version}"  # a run of both threads' rows may round in another way
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=what)

        with cluster.under_load(inputs, check) as seen:
            export_shards(paths[1], tmp_path / "s", model=whole_model.build)
        assert (seen[0], seen[-1]) == (1, 2)
        assert cluster.ask(inputs, version=1)[0] == 1, "the version before is still there"
