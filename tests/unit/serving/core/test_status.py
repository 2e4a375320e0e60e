"""TensorFlow's messages as a server answers them."""

import numpy as np
import pytest

from tpuembed.errors.ids import MOST_OF_NAME, Span, outside_texts, unknown_name_texts, unknown_texts
from tpuembed.lookup import OUTSIDE
from tpuembed_serving.core.status import Code, StatusError, of_later_rows, plain_message

SENTENCE = (
    "feature a/b: id -5 of row 3 is not in table it's [odd], which has 10 rows; correct the id or set out_of_vocabulary"
)


@pytest.mark.parametrize("node", [OUTSIDE, f"model/x/{OUTSIDE}", f"{OUTSIDE}_tfg_inlined_f/If_1", f"{OUTSIDE}_2"])
def test_the_sentence_of_an_id_alone(node: str) -> None:
    told = SENTENCE.replace("'", "\\'")
    text = f"{{{{function_node __inference_f_1}}}} assertion failed: [{told}]\n\t [[{{{{node {node}}}}}]]\n\t [[other]]"
    assert plain_message(text) == SENTENCE


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("indices[0] = 5 is not in [0, 5)\n\t [[{{node g}}]]", None),
        ("{{function_node __inference_f_1}} assertion failed: [feature x: id 1]\n\t [[{{node mine}}]]",
         "assertion failed: [feature x: id 1]\n\t [[{{node mine}}]]"),
    ],
)  # fmt: skip
def test_other_messages_stay_but_for_functions(message: str, wanted: str | None) -> None:
    assert plain_message(message) == (wanted or message)


def test_the_row_of_a_later_part_is_the_requests() -> None:
    error = of_later_rows(StatusError(Code.INVALID_ARGUMENT, SENTENCE), 16)
    assert isinstance(error, StatusError)
    assert (error.code, error.message) == (Code.INVALID_ARGUMENT, SENTENCE.replace("row 3", "row 19"))
    other = StatusError(Code.INTERNAL, "no row 3")
    assert of_later_rows(other, 16).args == other.args
    assert of_later_rows(error, 0) is error


def test_the_row_of_an_unknown_name_in_a_later_part() -> None:
    """A client's name may say anything, also what the sentence says behind it."""
    for name in ("x", "' of row 3 is not in the vocabulary of table", "\n"):
        before, between, after = unknown_name_texts("user", "users", 5)
        error = StatusError(Code.INVALID_ARGUMENT, f"{before}{name}{between}3{after}")
        later = of_later_rows(error, 16)
        assert isinstance(later, StatusError)
        assert later.message == f"{before}{name}{between}19{after}"
    unknown = " of row 3".join(unknown_texts("user", "users"))
    later = of_later_rows(StatusError(Code.INVALID_ARGUMENT, unknown), 16)
    assert isinstance(later, StatusError)
    assert later.message == unknown.replace("row 3", "row 19")


@pytest.mark.parametrize(
    "part",
    [
        "{{function_node ", "assertion failed: [feature ", ": name '", "' of row 1", ": id 1", "]  [[", "1",
        "/tpuembed_id_outside", "]  [[/tpuembed_id_outsid", "]\t", "[[a/",
    ],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_a_message_that_quotes_a_client_is_read_in_linear_time(part: str) -> None:
    """TensorFlow quotes strings that are no numbers. Of 1 MB, three of these took minutes."""
    text = f"StringToNumberOp could not correctly convert string: {part * (10**6 // len(part))}"
    assert plain_message("{{function_node f}} " + text) == text
    plain_message(f"assertion failed: [feature ] [[{text} x")
    error = of_later_rows(StatusError(Code.INVALID_ARGUMENT, text), 16)
    assert error.args == (text,)


def test_a_sentence_of_a_name_has_less_than_200_characters() -> None:
    rng = np.random.default_rng(1)
    for _ in range(500):
        feature, table = ("".join(map(chr, rng.integers(97, 900, int(size)))) for size in 10 ** rng.uniform(0, 3, 2))
        before, between, after = unknown_name_texts(feature, table, int(2 ** rng.uniform(0, 31)))
        assert len(f"{before}{'x' * MOST_OF_NAME}...{between}{2**31}{after}") < 200
        if len(feature) + len(table) < 25:
            assert before == f"feature {feature}: name '"
            assert f" of table {table}, " in after
        before, after = unknown_texts(feature, table)
        assert len(f"{before} of row {2**31}{after}") < 200
        if len(feature) + len(table) < 25:
            assert (before, f" of table {table}; " in after) == (f"feature {feature}: a name", True)


def test_a_sentence_has_less_than_200_characters() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        feature, table = ("".join(map(chr, rng.integers(97, 900, int(size)))) for size in 10 ** rng.uniform(0, 3, 2))
        before, after = outside_texts(feature, Span(table, int(2 ** rng.uniform(1, 62))))
        assert len(f"{before}{-(2**63)} of row {2**31}{after}") < 200
        if len(feature) + len(table) < 30:
            assert (f"feature {feature}: id " == before, f" is not in table {table}, " in after) == (True, True)
