"""Rules of the lists of tensors that loops keep."""

from tpuembed_serving.batching.row_proof.rules import (
    USES_BATCH_SIZE,
    NodeCall,
    as_rows,
    known_shape,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed_serving.batching.row_proof.values import Kind, MixedError, Size, Value, same


@rule("TensorListFromTensor")
def _list_of(call: NodeCall) -> list[Value]:
    value, wanted = call.inputs
    if value.kind is Kind.SAME:
        element = same(None if value.shape is None else value.shape[1:])
    else:
        shape = known_shape(as_rows(value).shape)
        refuse_width(value)
        if value.axis == 0:
            raise MixedError("it goes over rows")
        element = rows_value(shape[1:], value.axis - 1)
    return [_with_element(Value(Kind.LIST, declared=_declared(wanted)), element)]


@rule("TensorListReserve", "EmptyTensorList")
def _new_list(call: NodeCall) -> list[Value]:
    if call.inputs[1].kind is not Kind.SAME:
        raise MixedError(USES_BATCH_SIZE)
    return [Value(Kind.LIST, declared=_declared(call.inputs[0]))]


def _declared(wanted: Value) -> tuple[Size, ...] | None:
    """The shape that the tensors of a list are said to have; a negative number leaves an axis open, None all of it."""
    if wanted.kind not in (Kind.SAME, Kind.SIZE) or wanted.sizes is None:
        raise MixedError("the shape of its tensors is not known before it runs")
    return None if wanted.shape == () else wanted.sizes


def _taken(kept: Value, wanted: tuple[Size, ...] | None) -> Value:
    """Return the value of one tensor of a list, in its own shape. A tensor that was never set is zeros of the declared shape."""
    element = kept.element
    if element is None:
        raise MixedError("what its tensors are is not known")
    for shape in (kept.declared, wanted):
        element = _in_shape(element, shape)
    return element


def _in_shape(element: Value, declared: tuple[Size, ...] | None) -> Value:
    """A tensor of a list of which this shape is declared: in a shape left open, it is that of the tensors that were set."""
    if declared is None:
        return element
    known = element.shape
    is_open = [size.number is not None and size.number < 0 for size in declared]
    fits = known is not None and len(known) == len(declared)
    if known is not None and fits:
        fits = all(free or size == own for free, size, own in zip(is_open, declared, known, strict=True))
    if element.kind is Kind.SAME:
        if not all(size.is_same for size in declared):
            raise MixedError(USES_BATCH_SIZE)
        return element if fits else same()
    if known is None or len(known) != len(declared) or not (declared == known or is_open[element.axis]):
        raise MixedError("a fixed number of rows is asked for")
    return element


@rule("TensorListGetItem")
def _list_item(call: NodeCall) -> list[Value]:
    kept, index = call.inputs[:2]
    if kept.kind is not Kind.LIST or kept.element is None or index.kind is not Kind.SAME:
        raise MixedError("which of its tensors is taken depends on rows")
    return [_taken(kept, _declared(call.inputs[2]))]


@rule("TensorListSetItem")
def _set_item(call: NodeCall) -> list[Value]:
    kept, index, value = call.inputs
    if kept.kind is not Kind.LIST or index.kind is not Kind.SAME or call.flag("resize_if_index_out_of_bounds"):
        raise MixedError("which of its tensors is set depends on rows")
    return [_with_element(kept, value)]


@rule("TensorListPushBack")
def _push(call: NodeCall) -> list[Value]:
    if call.inputs[0].kind is not Kind.LIST:
        raise MixedError("it is not known what it is put into")
    return [_with_element(*call.inputs)]


def _with_element(kept: Value, value: Value) -> Value:
    """The list with one more tensor; of numbers that are known of one, nothing is known of each."""
    as_rows(value, Kind.ROWS, Kind.SAME)
    refuse_width(value)
    element = Value(value.kind, value.shape, value.axis)
    if kept.element is not None and kept.element != element:
        raise MixedError("its tensors differ")
    if element.kind is Kind.ROWS:
        _in_shape(element, kept.declared)
    return Value(Kind.LIST, element=element, declared=kept.declared)


@rule("TensorListStack")
def _stack_list(call: NodeCall) -> list[Value]:
    kept = call.inputs[0]
    if kept.kind is not Kind.LIST:
        raise MixedError("what its tensors are is not known")
    value = _taken(kept, _declared(call.inputs[1]))
    if value.kind is Kind.SAME:
        return [same(None if value.shape is None else (call.unknown(), *value.shape))]
    return [rows_value([call.unknown(), *known_shape(value.shape)], value.axis + 1)]


@rule("TensorListLength")
def _list_length(_: NodeCall) -> list[Value]:
    return [same(())]


@rule("NoOp")
def _nothing(_: NodeCall) -> list[Value]:
    return []
