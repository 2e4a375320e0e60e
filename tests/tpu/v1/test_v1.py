"""What a layer tells and hands to a V1 accelerator, of three fixed models, against goldens and TensorFlow's documentation."""

import functools
import re

import pytest

from tests.tpu.environments import TENSORFLOW_TPU
from tests.tpu.numbers.running import NO_TPU, run
from tests.tpu.v1 import fields
from tests.tpu.v1.checks import CHECKS
from tests.tpu.v1.models import MODELS
from tests.tpu.v1.tracing import Traced, trace


@functools.cache
def traced(name: str) -> Traced:
    return trace(MODELS[name]())


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_passes_the_check(name: str, check: str) -> None:
    CHECKS[check](name, MODELS[name](), traced(name))


def test_every_optimizer_and_kind_of_ids_is_among_the_models() -> None:
    models = [make() for make in MODELS.values()]
    rules = {fields.optimizer_of(model, table).kind for model in models for table in model.tables()}
    assert rules == {"sgd", "adagrad", "adagrad_momentum", "adam", "ftrl"}
    assert {kind for model in models for kind in model.kinds.values()} == {"sparse", "ragged", "dense"}
    assert {table.combiner for model in models for table in model.tables()} == {"sum", "mean", "sqrtn"}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_tensorflows_own_pass_finds_a_training_and_an_evaluation_call() -> None:
    """The rule that `modes_follow_the_gradients` restates, by the pass itself."""
    logged = {"TF_CPP_VMODULE": "update_tpu_embedding_ops_passes=1", "TF_CPP_MIN_LOG_LEVEL": "0"}
    said = run(TENSORFLOW_TPU, "tests.tpu.v1.mode_pass", names={**NO_TPU, **logged})
    found = re.findall(r"Found call (\d+) (with|without) +send op", said)
    assert found == [("1", "with"), ("2", "without")] * len(MODELS), said[-2000:]
