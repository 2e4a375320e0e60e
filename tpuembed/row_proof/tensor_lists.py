"""Rules of the lists of tensors that loops keep."""

from tpuembed.row_proof.rules import (
    USES_BATCH_SIZE,
    NodeCall,
    arranged,
    as_rows,
    inserted,
    refuse_width,
    rows_value,
    rule,
)
from tpuembed.row_proof.values import Kind, MixedError, Size, Value, same


@rule("TensorListReserve", "EmptyTensorList")
def _new_list(call: NodeCall) -> Value:
    if call.inputs[1].kind is not Kind.SAME:
        raise MixedError(USES_BATCH_SIZE)
    return Value(Kind.LIST, declared=_declared(call.inputs[0]))


@rule("TensorListFromTensor")
def _list_of(call: NodeCall) -> Value:
    value, wanted = call.inputs
    refuse_width(value)
    if value.kind is not Kind.SAME or value.shape is not None:
        value = arranged(value, range(1, len(value.known_shape)), "it goes over rows")
    return _with_element(Value(Kind.LIST, declared=_declared(wanted)), value)


@rule("TensorListSetItem", "TensorListPushBack")
def _set_item(call: NodeCall) -> Value:
    kept, *index, value = call.inputs
    if any(one.kind is not Kind.SAME for one in index) or call.attr("resize_if_index_out_of_bounds").b:
        raise MixedError("which of its tensors is set depends on rows")
    return _with_element(kept, value)


@rule("TensorListGetItem")
def _item(call: NodeCall) -> Value:
    kept, index, wanted = call.inputs
    as_rows(index, Kind.SAME)
    return _taken(kept, wanted)


@rule("TensorListStack")
def _stacked(call: NodeCall) -> Value:
    value = _taken(*call.inputs)
    if value.kind is Kind.SAME and value.shape is None:
        return same()
    return arranged(value, inserted(value.known_shape, 0, call.unknown()))


@rule("TensorListLength")
def _length(_: NodeCall) -> Value:
    return same(())


def _declared(wanted: Value) -> tuple[Size, ...] | None:
    if wanted.kind not in (Kind.SAME, Kind.SIZE) or wanted.sizes is None:
        raise MixedError("the shape of its tensors is not known before it runs")
    return None if wanted.shape == () else wanted.sizes


def _with_element(kept: Value, value: Value) -> Value:
    """Return the list with one more tensor. What is known of the numbers of one is not known of each."""
    if as_rows(value, Kind.ROWS, Kind.SAME).kind is Kind.ROWS:
        element = rows_value(value.known_shape, value.axis)
        _in_shape(element, kept.declared)
    else:
        element = same(value.shape)
    if value.is_padded or kept.kind is not Kind.LIST or kept.element not in (None, element):
        raise MixedError("its tensors differ")
    return Value(Kind.LIST, element=element, declared=kept.declared)


def _taken(kept: Value, wanted: Value) -> Value:
    """Return the value of any tensor of a list. One that was never set is zeros of the shape that is declared, or wanted."""
    if kept.kind is not Kind.LIST or kept.element is None:
        raise MixedError("what its tensors are is not known")
    return _in_shape(_in_shape(kept.element, kept.declared), _declared(wanted))


def _in_shape(element: Value, declared: tuple[Size, ...] | None) -> Value:
    """Return `element` as far as it is also known of zeros of a declared shape. An axis left open is as in `element`."""
    if declared is None:
        return element
    known = element.shape
    is_open = [size.number is not None and size.number < 0 for size in declared]
    if element.kind is Kind.SAME:
        if not all(size.is_same for size in declared):
            raise MixedError(USES_BATCH_SIZE)
        if known is None or len(known) != len(declared):
            return same()
        fits = all(free or size == own for free, size, own in zip(is_open, declared, known, strict=True))
        return element if fits else same()
    if known is None or len(known) != len(declared) or not (declared == known or is_open[element.axis]):
        raise MixedError("a fixed number of rows is asked for")
    return element
