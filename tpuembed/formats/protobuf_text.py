"""Reads protobuf's text format with Google's parser.

Of some messages no installed package has the generated class. `message_class` makes one.
"""

from collections.abc import Mapping
from typing import Any, Final

from tpuembed.formats.protobuf import MalformedError

__all__ = ["message_class", "parse_text"]

_MAX_REASON: Final = 200


def message_class(name: str, messages: Mapping[str, Mapping[str, str]]) -> Any:
    """Return the class of the message `name`.

    The text format has names only, so fields are numbered in order, whatever numbers they have elsewhere.

    Args:
        name: one of `messages`.
        messages: the fields of each message: the type of each field by its name. A type is int64, bool, string, the name of
            one of `messages`, or google.protobuf's Int64Value, BoolValue or StringValue. A list's type begins with "repeated".
    """
    from google.protobuf import (  # type: ignore[import-untyped]
        descriptor_pb2,
        descriptor_pool,
        message_factory,
        wrappers_pb2,
    )

    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {"int64": kinds.TYPE_INT64, "bool": kinds.TYPE_BOOL, "string": kinds.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(
        name="messages.proto", package="tpuembed", syntax="proto3", dependency=[wrappers_pb2.DESCRIPTOR.name]
    )
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            is_list, kind = kind.startswith("repeated "), kind.removeprefix("repeated ")
            label = kinds.LABEL_REPEATED if is_list else kinds.LABEL_OPTIONAL
            added = described.field.add(name=field, number=number, label=label)
            added.type = scalars.get(kind, kinds.TYPE_MESSAGE)
            if kind not in scalars:
                added.type_name = f".tpuembed.{kind}" if kind in messages else f".google.protobuf.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tpuembed.{name}"))


def parse_text(text: str, message: Any, *, allow_unknown: bool = False) -> Any:
    """Return `message` with the fields in `text`. Unknown fields are skipped if `allow_unknown`.

    Raises:
        MalformedError: the text has another form, or an unknown field. The message begins with the line and the column.
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, message, allow_unknown_field=allow_unknown)
    except text_format.ParseError as error:
        _, _, reason = str(error).partition(" : ")
        where = f"line {error.GetLine() or 1}, column {error.GetColumn() or 1}"
        raise MalformedError(f"{where}: {' '.join(reason.split())[:_MAX_REASON]}") from None
    except RecursionError:
        raise MalformedError("its messages are nested too deeply") from None
