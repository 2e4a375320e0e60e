"""The rules against TensorFlow's own kernels, over 20 steps of duplicate ids. tests/support/layer/models.py has them in float64.

Each kernel computes the same rule under the parameters given here; where no kernel does (Adam with epsilon inside the root),
the float64 reference stands alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tpuembed import FTRL, SGD, Adagrad, AdagradMomentum, Adam
from tpuembed.backends.row_optimizers import dedupe, update_rows

ROWS, DIM, STEPS = 9, 4, 20
RATE = 0.2
Array = npt.NDArray[np.float32]


def _sgd(spec: Any, variables: Sequence[Any], ids: Any, gradients: Any) -> None:
    variables[0].scatter_sub(tf.IndexedSlices(RATE * gradients, ids))


def _adagrad(spec: Adagrad, variables: Sequence[Any], ids: Any, gradients: Any) -> None:
    table, accumulators = (variable.handle for variable in variables[:2])
    tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=table, accum=accumulators, lr=RATE, epsilon=0.0, grad=gradients, indices=ids, update_slots=True
    )


def _ftrl(spec: FTRL, variables: Sequence[Any], ids: Any, gradients: Any) -> None:
    """V2 has no beta; the proto of the TPU's says that others take it as L2 of beta / (2 rate)."""
    table, accumulators, linears = (variable.handle for variable in variables)
    tf.raw_ops.ResourceSparseApplyFtrlV2(
        var=table,
        accum=accumulators,
        linear=linears,
        grad=gradients,
        indices=ids,
        lr=RATE,
        l1=spec.l1_regularization_strength,
        l2=spec.l2_regularization_strength + float(spec.beta) / (2 * RATE),
        l2_shrinkage=0.0,
        lr_power=spec.learning_rate_power,
        multiply_linear_by_lr=spec.multiply_linear_by_learning_rate,
    )


def _momentum(spec: AdagradMomentum, variables: Sequence[Any], ids: Any, gradients: Any) -> None:
    """Without the accumulator (an exponent that makes it 1) the rule is momentum; Keras' keeps minus the rate times it."""
    table, momenta = variables[0], variables[2]
    scaled = tf.Variable(-RATE * momenta.read_value())
    tf.raw_ops.ResourceSparseApplyKerasMomentum(
        var=table.handle,
        accum=scaled.handle,
        lr=RATE,
        grad=gradients,
        indices=ids,
        momentum=spec.momentum,
        use_nesterov=spec.use_nesterov,
    )
    momenta.assign(scaled / -RATE)


def _rmsprop(spec: AdagradMomentum, variables: Sequence[Any], ids: Any, gradients: Any) -> None:
    """With an average for the sum and the square root the rule is RMSProp, whose momentum has the rate in it."""
    table, accumulators, momenta = variables
    scaled = tf.Variable(RATE * momenta.read_value())
    tf.raw_ops.ResourceSparseApplyRMSProp(
        var=table.handle,
        ms=accumulators.handle,
        mom=scaled.handle,
        lr=RATE,
        rho=spec.beta2,
        momentum=spec.momentum,
        epsilon=spec.epsilon,
        grad=gradients,
        indices=ids,
    )
    momenta.assign(scaled / RATE)


def _adam(spec: Adam, variables: Sequence[Any], ids: Any, gradients: Any) -> None:
    """TensorFlow's dense kernel on the touched rows alone; powers of zero undo its bias correction."""
    rows = [tf.Variable(tf.gather(variable, ids)) for variable in variables]
    tf.raw_ops.ResourceApplyAdam(
        var=rows[0].handle,
        m=rows[1].handle,
        v=rows[2].handle,
        beta1_power=0.0,
        beta2_power=0.0,
        lr=RATE,
        beta1=spec.beta_1,
        beta2=spec.beta_2,
        epsilon=spec.epsilon,
        grad=gradients,
    )
    for variable, row in zip(variables, rows, strict=True):
        variable.scatter_update(tf.IndexedSlices(row, ids))


CASES: dict[str, tuple[Any, Callable[..., None]]] = {
    "sgd": (SGD(), _sgd),
    "adagrad": (Adagrad(), _adagrad),
    "adagrad, from 0.5": (Adagrad(initial_accumulator_value=0.5), _adagrad),
    "ftrl": (FTRL(), _ftrl),
    "ftrl, regularized": (FTRL(l1_regularization_strength=0.2, l2_regularization_strength=0.1), _ftrl),
    "ftrl, beta and power": (FTRL(learning_rate_power=-0.7, beta=0.4, initial_accumulator_value=0.5), _ftrl),
    "ftrl, linear times rate": (
        FTRL(l1_regularization_strength=0.2, l2_regularization_strength=0.1, multiply_linear_by_learning_rate=True),
        _ftrl,
    ),
    "momentum as adagrad": (AdagradMomentum(), _adagrad),
    "momentum": (AdagradMomentum(momentum=0.7, exponent=1e30), _momentum),
    "momentum, nesterov": (AdagradMomentum(momentum=0.7, exponent=1e30, use_nesterov=True), _momentum),
    "rmsprop": (AdagradMomentum(momentum=0.7, beta2=0.6, epsilon=1e-2), _rmsprop),
    # Betas that float32 holds exactly: the kernel's own 1 - 0.999f is wrong by 1e-5.
    "adam": (Adam(beta_1=0.875, beta_2=1 - 2**-10, sum_inside_sqrt=False), _adam),
    "adam, large epsilon": (Adam(beta_1=0.75, beta_2=0.9375, epsilon=0.1, sum_inside_sqrt=False), _adam),
}


def _variables(spec: Any, rows: Array) -> list[Any]:
    slots = [np.full_like(rows, spec.slot_initial_value(slot)) for slot in spec.slots]
    return [tf.Variable(value) for value in (rows, *slots)]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_equals_tensorflows_kernel(name: str) -> None:
    spec, kernel = CASES[name]
    random = np.random.default_rng(5)
    rows = random.normal(size=(ROWS, DIM)).astype(np.float32)
    ours, theirs = _variables(spec, rows), _variables(spec, rows)
    for _ in range(STEPS):
        ids = random.integers(0, ROWS - 1, 12)
        gradients = random.normal(size=(12, DIM)).astype(np.float32)
        update_rows(spec, tf.constant(RATE), ours[0], ours[1:], *dedupe(tf.constant(ids), tf.constant(gradients), ROWS))
        summed = np.zeros((ROWS, DIM), np.float64)
        np.add.at(summed, ids, gradients.astype(np.float64))
        touched = np.unique(ids)
        kernel(spec, theirs, tf.constant(touched), tf.constant(summed[touched], tf.float32))
    compared = len(ours) if kernel is not _adagrad else 2
    for slot, mine, truth in zip(("table", *spec.slots), ours[:compared], theirs, strict=False):
        if kernel is _momentum and slot == "accumulators":
            continue
        scale = max(1.0, np.abs(truth.numpy()).max())
        np.testing.assert_allclose(mine.numpy() / scale, truth.numpy() / scale, rtol=1e-6, atol=1e-6, err_msg=slot)
    np.testing.assert_array_equal(ours[0].numpy()[-1], rows[-1])


@pytest.mark.parametrize("jit", [False, True])
def test_ids_outside_the_table_are_dropped(jit: bool) -> None:
    """A scatter on a GPU takes 2**40 for row 0, and the gather before it gives zeros: row 0 would become zeros."""
    random = np.random.default_rng(5)
    ids = np.concatenate([random.integers(0, ROWS, 6), [ROWS, -1, -7, 2**32 + 1, 2**40, 2**63 - 1, -(2**63)]])
    random.shuffle(ids)
    gradients = random.normal(size=(len(ids), 3)).astype(np.float32)
    unique, summed = tf.function(lambda ids, rows: dedupe(ids, rows, ROWS), jit_compile=jit)(ids, gradients)
    kept = {int(id_): row for id_, row in zip(unique.numpy(), summed.numpy(), strict=True) if not (jit and id_ == ROWS)}
    assert set(kept) == {id_ for id_ in ids.tolist() if 0 <= id_ < ROWS}
    for id_, row in kept.items():
        np.testing.assert_allclose(row, gradients[ids == id_].sum(0), rtol=1e-5, atol=1e-6)
