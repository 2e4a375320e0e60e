"""Every broken variant is caught by the check that is named for it."""

import pytest

from tests.tpu.numbers.variant import Variant
from tests.tpu.v1.broken import BROKEN
from tests.tpu.v1.checks import CHECKS
from tests.tpu.v1.models import MODELS
from tests.tpu.v1.tracing import trace

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("variant", BROKEN, ids=lambda variant: variant.name)
def test_a_broken_variant_is_caught(variant: Variant) -> None:
    model = MODELS[variant.on]()
    with variant.patch():
        traced = trace(model)
    with pytest.raises(AssertionError):
        CHECKS[variant.check](variant.on, model, traced)


def test_every_check_has_a_variant() -> None:
    assert {variant.check for variant in BROKEN} == CHECKS.keys()
