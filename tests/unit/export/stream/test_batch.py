"""What a worker raised is said by its parent in the same words."""

import pytest

from tpuembed import errors
from tpuembed.export.stream.batch import Failure

KINDS = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]


@pytest.mark.parametrize("name", KINDS)
def test_an_error_keeps_its_class_and_its_text(name: str) -> None:
    error = Failure(name, "checkpoint x: is gone", may_pass=False).error("shard 3")
    assert type(error) is getattr(errors, name)
    assert str(error) == "checkpoint x: is gone"
    error.args = (f"{error}; and more",)
    assert str(error) == "checkpoint x: is gone; and more"


def test_a_defect_names_the_shard() -> None:
    error = Failure("", "ZeroDivisionError: x", may_pass=False).error("shard 3")
    assert str(error).startswith("shard 3: ZeroDivisionError: x. This is a defect")
