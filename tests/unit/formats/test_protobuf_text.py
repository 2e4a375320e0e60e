"""Messages of no generated class in protobuf's text format."""

import pytest

from tests.support.messages import refused
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.protobuf_text import message_class, parse_text

NODE = message_class(
    "Node",
    {
        "Node": {"name": "string", "numbers": "repeated int64", "children": "repeated Node", "limit": "Int64Value"},
        "Other": {"on": "bool"},
    },
)


def test_every_type_of_field() -> None:
    text = """name: "a\\x41" 'b' # a comment { "
        numbers: [1, -0x10] numbers: 017, children < name: "c" limit { value: 0 } >; children: { children {} }"""
    found = parse_text(text, NODE())
    assert (found.name, list(found.numbers), found.HasField("limit")) == ("aAb", [1, -16, 15], False)
    assert [child.name for child in found.children] == ["c", ""]
    assert found.children[0].HasField("limit")
    assert len(found.children[1].children) == 1


def test_unknown_fields_are_skipped_on_request_only() -> None:
    text = 'float: 1.5 kind: BIG more { deep: [1, 2] { x: "}" } } name: "a"'.replace("{ x", "y { x")
    assert parse_text(text, NODE(), allow_unknown=True).name == "a"
    with refused(MalformedError, match="line 1"):
        parse_text(text, NODE())


@pytest.mark.parametrize(
    "text",
    [
        "name", "name:", "name 3", 'name: "a', "name: 'a\n'", "children {", "children { >", "children }", "numbers: [1",
        "numbers: [1,]", "numbers: 1.5", "numbers: 1e3", "numbers: 08", "numbers: --1", ": 3", "@", "numbers: " + "1" * 5000,
        "numbers: 9223372036854775808", "children { " * 5000, r'name: "\377"', 'name: "a" name: "b"', "\n" * 10 + "name" * 999,
    ],
)  # fmt: skip
@pytest.mark.parametrize("allow_unknown", [False, True])
def test_text_that_is_refused(text: str, allow_unknown: bool) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_text(text, NODE(), allow_unknown=allow_unknown)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300
