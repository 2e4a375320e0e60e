"""Deliberately broken variants of the layer, and the check of the lowered step that must catch each."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

from tests.tpu.cells import NO_LOOP, Cell

__all__ = ["BROKEN", "Broken", "breaking", "cells"]


@dataclasses.dataclass(frozen=True)
class Broken:
    """A variant.

    Attributes:
        breaks: what is wrong, for people.
        check: the check that must fail.
        cell: what it is checked on.
        patch: breaks the layer while it is entered.
    """

    breaks: str
    check: str
    cell: Cell
    patch: Callable[[], AbstractContextManager[Any]]


def cells() -> list[Cell]:
    """One for each variant."""
    return [dataclasses.replace(one.cell, broken=name) for name, one in BROKEN.items()]


@contextlib.contextmanager
def breaking(name: str) -> Iterator[None]:
    """The layer with what is broken in the variant `name`; as it is for any other."""
    with _patch(name):
        yield


def _patch(name: str) -> AbstractContextManager[Any]:
    if name == NO_LOOP.broken:
        return _without_loop()
    return BROKEN[name].patch() if name in BROKEN else contextlib.nullcontext()


# Patches import what they break: only the process that traces has it.


def _apply(change: Callable[[Any, Any], Any]) -> AbstractContextManager[Any]:
    """SparseCores' `apply(gradients)` with `change(apply, gradients)` in its place."""
    from tpuembed.backends.tpu import sparsecore

    real = sparsecore._SparseCoreStep.apply
    return mock.patch.object(
        sparsecore._SparseCoreStep, "apply", lambda step, gradients: change(lambda given: real(step, given), gradients)
    )


def _no_update() -> AbstractContextManager[Any]:
    return _apply(lambda *_: [])


def _zero_gradients() -> AbstractContextManager[Any]:
    import tensorflow as tf

    return _apply(lambda apply, gradients: apply([tf.zeros_like(gradient) for gradient in gradients]))


def _twice() -> AbstractContextManager[Any]:
    return _apply(lambda apply, gradients: [*apply(gradients), *apply(gradients)])


def _lookup(change: Callable[[Any, Callable[[], Any]], Any]) -> AbstractContextManager[Any]:
    """SparseCores' `lookup()` with `change(step, lookup)` in its place."""
    from tpuembed.backends.tpu import sparsecore

    real = sparsecore._SparseCoreStep.lookup
    return mock.patch.object(sparsecore._SparseCoreStep, "lookup", lambda step: change(step, lambda: real(step)))


def _looked_up_twice() -> AbstractContextManager[Any]:
    def mean_of_two(_: Any, lookup: Callable[[], Any]) -> Any:
        return [(first + second) / 2.0 for first, second in zip(lookup(), lookup(), strict=True)]

    return _lookup(mean_of_two)


def _update_in_lookup() -> AbstractContextManager[Any]:
    """Also an evaluation trains."""
    import tensorflow as tf

    def trained(step: Any, lookup: Callable[[], Any]) -> Any:
        activations = lookup()
        step.apply([tf.ones_like(activation) for activation in activations])
        return activations

    return _lookup(trained)


def _shrinking_lookup() -> AbstractContextManager[Any]:
    def shrunk(step: Any, lookup: Callable[[], Any]) -> Any:
        for of_stack in step._engine.tables.values():
            rows = of_stack["parameters"]
            rows.assign(rows.read_value() * 0.5)
        return lookup()

    return _lookup(shrunk)


def _csr(change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """The hosts' buffers of every stack, changed."""
    from tpuembed.backends.tpu.tf_tpu import SparseCoreEngine

    real = SparseCoreEngine._preprocess_features

    def preprocess(engine: Any, **arguments: Any) -> Any:
        return {name: change(of_stack) for name, of_stack in real(engine, **arguments).items()}

    return mock.patch.object(SparseCoreEngine, "_preprocess_features", preprocess)


def _stacks_exchanged() -> AbstractContextManager[Any]:
    """Each stack gets the hosts' buffers of the next one, all of which are of one length."""
    from tpuembed.backends.tpu.tf_tpu import SparseCoreEngine

    real = SparseCoreEngine._preprocess_features

    def preprocess(engine: Any, **arguments: Any) -> Any:
        made = real(engine, **arguments)
        stacks = list(made)
        return {name: made[other] for name, other in zip(stacks, stacks[1:] + stacks[:1], strict=True)}

    return mock.patch.object(SparseCoreEngine, "_preprocess_features", preprocess)


def _swapped_ids() -> AbstractContextManager[Any]:
    def swapped(of_stack: Any) -> Any:
        tensors, *sizes = of_stack
        return (
            tensors._replace(sorted_sample_ids=tensors.sorted_token_ids, sorted_token_ids=tensors.sorted_sample_ids),
            *sizes,
        )

    return _csr(swapped)


def _pointers_for_ids() -> AbstractContextManager[Any]:
    def swapped(of_stack: Any) -> Any:
        tensors, *sizes = of_stack
        return (tensors._replace(row_pointers=tensors.sorted_token_ids), *sizes)

    return _csr(swapped)


def _short_buffer() -> AbstractContextManager[Any]:
    from tpuembed.backends.tpu.tf_tpu import SparseCoreEngine

    real = SparseCoreEngine.__init__

    def short(engine: Any, *arguments: Any) -> None:
        real(engine, *arguments)
        engine.max_ids_per_chip_per_sample -= 1

    return mock.patch.object(SparseCoreEngine, "__init__", short)


def _no_limits() -> AbstractContextManager[Any]:
    from tpuembed.backends.tpu.tf_tpu import SparseCoreEngine

    return mock.patch.object(SparseCoreEngine, "limit_ids")


def _twice_the_rows() -> AbstractContextManager[Any]:
    from tpuembed.backends import tf_config

    real = tf_config._table_to_tf
    return mock.patch.object(
        tf_config,
        "_table_to_tf",
        lambda table: real(dataclasses.replace(table, vocabulary_size=2 * table.vocabulary_size)),
    )


def _frozen_dense() -> AbstractContextManager[Any]:
    import keras

    real = keras.optimizers.SGD.apply

    def apply(optimizer: Any, gradients: Any, variables: Any) -> Any:
        kept = [(g, v) for g, v in zip(gradients, variables, strict=True) if v.ndim != 2]
        return real(optimizer, [g for g, _ in kept], [v for _, v in kept])

    return mock.patch.object(keras.optimizers.SGD, "apply", apply)


def _without_loop() -> AbstractContextManager[Any]:
    """The layer no longer asks for the loop that pipelined steps need."""
    from tpuembed.backends.tpu import sparsecore

    return mock.patch.object(sparsecore, "check_loop")


def _spec(**changes: Any) -> AbstractContextManager[Any]:
    """Table optimizers with other hyper-parameters than asked for."""
    from tpuembed.backends.tpu import accelerator

    return _resolving(accelerator, changes)


def _spec_of_copies(**changes: Any) -> AbstractContextManager[Any]:
    from tpuembed.layer import core

    return _resolving(core, changes)


def _resolving(module: Any, changes: dict[str, Any]) -> AbstractContextManager[Any]:
    real = module.resolve_optimizer
    return mock.patch.object(module, "resolve_optimizer", lambda given: dataclasses.replace(real(given), **changes))


def _sgd_instead() -> AbstractContextManager[Any]:
    from tpuembed.backends.tpu import accelerator
    from tpuembed.config import SGD

    return mock.patch.object(accelerator, "resolve_optimizer", lambda given: SGD(learning_rate=given.learning_rate))


def _unwritten_slot() -> AbstractContextManager[Any]:
    """The first variable that an update writes keeps its values."""
    from tensorflow.python.tpu import tpu_embedding_v3

    real = tpu_embedding_v3.TPUEmbeddingShardedVariable.assign
    calls: list[Any] = []

    def assign(variable: Any, value: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(value)
        return real(variable, variable.read_value() if len(calls) == 1 else value, *arguments, **more)

    return mock.patch.object(tpu_embedding_v3.TPUEmbeddingShardedVariable, "assign", assign)


def _no_stamps() -> AbstractContextManager[Any]:
    from tpuembed.backends.tpu import accelerator

    return mock.patch.object(accelerator, "run_on_host")


def _own_gradients_alone() -> AbstractContextManager[Any]:
    from tpuembed.backends import host

    return mock.patch.object(host, "gather_replicas", lambda *given: given)


def _no_update_of_copies() -> AbstractContextManager[Any]:
    from tpuembed.backends.host import HostBackend

    return mock.patch.object(HostBackend, "update", return_value=[])


def _zero_gradients_of_copies() -> AbstractContextManager[Any]:
    import tensorflow as tf

    from tpuembed.backends.host import HostBackend

    real = HostBackend.update

    def update(backend: Any, table: str, ids: Any, gradients: Any, droppable: bool, stamp: Any) -> Any:
        return real(backend, table, ids, tf.zeros_like(gradients), droppable, stamp)

    return mock.patch.object(HostBackend, "update", update)


_SC = Cell("v5p", "sparsecore", "Adam")
_PIPELINED = dataclasses.replace(_SC, pipelining=True)
_COPIES = Cell("v5e", "replicated", "Adam", replicas=4)
_EVALUATION = dataclasses.replace(_SC, training=False)
_WIDTHS = dataclasses.replace(_SC, tables="widths")

BROKEN: Final = {
    "dropped_gradient": Broken("gradients are never applied", "number_of_updates", _SC, _no_update),
    "dropped_when_pipelined": Broken("the same, pipelined", "number_of_updates", _PIPELINED, _no_update),
    "zeros_when_pipelined": Broken(
        "zeros are applied in place of gradients, pipelined", "gradients_from_the_loss", _PIPELINED, _zero_gradients
    ),
    "zero_gradient": Broken("zeros are applied in place of gradients", "gradients_from_the_loss", _SC, _zero_gradients),
    "gradient_twice": Broken("every gradient is applied twice", "number_of_updates", _SC, _twice),
    "looked_up_twice": Broken("every lookup is done twice", "number_of_lookups", _SC, _looked_up_twice),
    "twice_the_rows": Broken("tables have twice as many rows", "shapes_of_tables", _SC, _twice_the_rows),
    "training_evaluation": Broken("lookups train too", "number_of_updates", _EVALUATION, _update_in_lookup),
    "shrinking_evaluation": Broken(
        "lookups halve the tables", "no_update_in_evaluation", _EVALUATION, _shrinking_lookup
    ),
    "swapped_ids": Broken("rows and samples change places", "check_buffers_of_hosts", _SC, _swapped_ids),
    "stacks_exchanged": Broken(
        "each stack looks up the ids of another one", "check_buffers_of_hosts", _WIDTHS, _stacks_exchanged
    ),
    "pointers_for_ids": Broken("row pointers are another buffer", "lengths_of_buffers", _SC, _pointers_for_ids),
    "short_buffer": Broken("buffers hold fewer ids than asked for", "lengths_of_buffers", _SC, _short_buffer),
    "no_limits": Broken("the tables' limits of ids are ignored", "limits_of_ids", _SC, _no_limits),
    "wrong_constant": Broken("Adam with another beta_2", "rule_of_updates", _SC, lambda: _spec(beta_2=0.5)),
    "wrong_rate": Broken(
        "a learning rate ten times as large", "rule_of_updates", _SC, lambda: _spec(learning_rate=3.0)
    ),
    "wrong_rule": Broken("SGD in place of Adam", "rule_of_updates", _SC, _sgd_instead),
    "unwritten_slot": Broken("a slot is not written", "tables_in_place", _SC, _unwritten_slot),
    "no_stamps": Broken(
        "the host writes no stamps", "check_stamps_of_host", dataclasses.replace(_SC, tracked=True), _no_stamps
    ),
    "own_gradients": Broken(
        "a replica applies its own gradients alone", "gradients_of_all_replicas", _COPIES, _own_gradients_alone
    ),
    "dropped_copies": Broken("copies are never updated", "updates_of_copies", _COPIES, _no_update_of_copies),
    "zero_copies": Broken("copies are updated with zeros", "updates_of_copies", _COPIES, _zero_gradients_of_copies),
    "wrong_copies": Broken(
        "copies' Adam with another beta_2", "rule_of_copies", _COPIES, lambda: _spec_of_copies(beta_2=0.5)
    ),
    "frozen_dense": Broken("the dense layer's kernel is not trained", "dense_weights_trained", _SC, _frozen_dense),
}
"""Name -> variant."""
