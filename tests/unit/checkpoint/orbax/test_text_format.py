"""The text format of protocol buffers, beside Google's own parser and printer."""

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from tpuembed.checkpoint.orbax.text_format import Fields, parse_text
from tpuembed.protobuf import MalformedError


def _message_class() -> Any:
    """message Node { string name = 1; repeated int64 numbers = 2; repeated Node children = 3; }"""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="node.proto", package="test", syntax="proto3")
    node = file.message_type.add(name="Node")
    node.field.add(name="name", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    node.field.add(name="numbers", number=2, type=field.TYPE_INT64, label=field.LABEL_REPEATED)
    node.field.add(
        name="children", number=3, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED, type_name=".test.Node"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Node"))


NODE = _message_class()

nodes = st.recursive(
    st.builds(lambda name, numbers: NODE(name=name, numbers=numbers), st.text(), st.lists(st.integers(-(1 << 63), (1 << 63) - 1))),
    lambda inner: st.builds(lambda name, children: NODE(name=name, children=children), st.text(), st.lists(inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


def fields_of(node: Any) -> Fields:
    """What the parser should make of it: fields that are set."""
    fields: dict[str, Any] = {"name": [node.name]} if node.name else {}
    if node.numbers:
        fields["numbers"] = list(node.numbers)
    if node.children:
        fields["children"] = [fields_of(child) for child in node.children]
    return fields


@given(nodes, st.booleans(), st.booleans(), st.booleans())
def test_what_google_prints(node: Any, one_line: bool, utf8: bool, brackets: bool) -> None:
    text = text_format.MessageToString(
        node, as_one_line=one_line, as_utf8=utf8, use_short_repeated_primitives=True, pointy_brackets=brackets
    )
    assert parse_text(text) == fields_of(node)


@pytest.mark.parametrize(
    "text",
    [
        r'name: "a\x41\101\n\"\\"',
        "name: 'it''s' \"one\"",
        'name: "x" # a comment { "',
        "numbers: 0x1F numbers: -017 numbers: [1, 2]",
        "numbers: []",
        'children { name: "a" }, children: < name: "b" >; numbers: -0x8000000000000000',
        "",
        "  \n# nothing\n",
    ],
)
def test_forms_that_google_reads(text: str) -> None:
    assert parse_text(text) == {
        **fields_of(text_format.Parse(text, NODE())),
        **({"numbers": []} if "[]" in text else {}),
    }


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "name:",
        "name 3",
        'name: "a',
        "name: 'a\n'",
        "children {",
        "children { >",
        "children }",
        "numbers: [1",
        "numbers: [1,]",
        "numbers: 1.5",
        "numbers: 1e3",
        "numbers: 08",
        "numbers: --1",
        "3: 4",
        ": 3",
        "@",
        "numbers: " + "1" * 30,
        "children { " * 100,
        r'name: "\377"',
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(text_format.ParseError):
        text_format.Parse(text.replace("1.5", "x").replace("1e3", "x"), NODE())
    with pytest.raises(MalformedError) as caught:
        parse_text(text)
    assert len(str(caught.value)) < 200
