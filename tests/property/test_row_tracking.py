"""Stamps and histories of rows against brute force: a random tree of trainings, with saves, restores and writes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.layer.branches import ROWS, make, restore, rows_of, step, write_save
from tpuembed import open_checkpoint
from tpuembed.live.tables import live_checkpoint
from tpuembed.manifest.row_history import RowHistory

run = st.integers(0, 1)
save = st.integers(0, 5)
rows = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=3)
actions = st.one_of(
    st.tuples(st.just("step"), run, rows),
    st.tuples(st.just("step"), run, rows),
    st.tuples(st.just("base"), run, st.none()),
    st.tuples(st.just("write"), run, rows),
    st.tuples(st.just("save"), run, st.sampled_from(["ckpt", "h5", "untracked"])),
    st.tuples(st.just("restore"), run, save),
    st.tuples(st.just("restore_tables"), run, save),
    st.tuples(st.just("some"), run, save),
    st.tuples(st.just("set_weights"), run, st.none()),
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(actions, min_size=8, max_size=30))
@example([("step", 0, [1]), ("save", 0, "ckpt"), ("write", 0, [2]), ("base", 0, None), ("restore", 0, 0)])
@example(
    [("save", 0, "ckpt"), ("restore", 0, 0), ("restore", 1, 0), ("step", 0, [0]), ("base", 0, None), ("step", 1, [1])]
)
@example([("step", 1, [0]), ("save", 1, "untracked"), ("base", 0, None), ("restore", 0, 0)])
@example([("save", 0, "h5"), ("step", 0, [0]), ("base", 0, None), ("restore", 0, 0), ("step", 0, [1])])
@example([("base", 0, None), ("some", 0, 0), ("save", 1, "ckpt"), ("some", 0, 0)])
@example([("base", 0, None), ("save", 1, "ckpt"), ("restore_tables", 0, 0)])
@example([("base", 0, None), ("set_weights", 0, None)])
@pytest.mark.nightly
def test_rows_that_differ_from_a_base_have_newer_stamps(
    tmp_path_factory: pytest.TempPathFactory, script: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    layers = [make() for _ in range(2)]
    saves: list[tuple[str, str]] = []
    bases: list[tuple[int, RowHistory, dict[str, Any]]] = []
    straight: set[int] = set()  # bases whose layer has only been trained and written since
    for what, number, detail in script:
        layer = layers[number]
        if what == "step":
            step(layer, detail)
        elif what == "write":
            layer.assign_rows("a", detail[0], np.random.default_rng().random((1, 2), np.float32))
        elif what == "save":
            saves.append(write_save(layer, detail, folder))
            if detail != "untracked":
                with open_checkpoint(saves[-1][1]) as checkpoint:
                    history = checkpoint.stamps["a"].history
                    assert history is not None
                    assert history == checkpoint.stamps["b"].history
                    bases.append((number, history, {name: checkpoint.read(name) for name in "ab"}))
                    straight.add(len(bases) - 1)
        elif what == "base":
            history = live_checkpoint(layer).stamps["a"].history
            assert history is not None
            bases.append((number, history, rows_of(layer)))
            straight.add(len(bases) - 1)
        elif what == "set_weights":
            layer.set_weights(layers[1 - number].get_weights())
            straight -= {index for index in straight if bases[index][0] == number}
        elif saves:
            kind, path = saves[detail % len(saves)]
            if what == "some":
                layer.restore_tables(path, ["b"])
            else:
                straight -= {index for index in straight if bases[index][0] == number}
                restore(layer, kind, path) if what == "restore" else layer.restore_tables(path)
    for number, layer in enumerate(layers):
        live = live_checkpoint(layer)
        history = live.stamps["a"].history
        assert history is not None
        for index, (owner, base, before) in enumerate(bases):
            if not history.since(base):
                assert owner != number or index not in straight, "a base that the layer passed through"
                continue
            for name in "ab":
                stamps = np.empty(ROWS, np.int32)
                live.stamps[name].read(0, stamps)
                differs = (rows_of(layer)[name] != before[name]).any(axis=1)
                assert not differs[stamps <= base.updates].any(), (name, stamps, base, history)
