"""Follows a signature's tensors through its graph, its functions, branches and loops."""

import dataclasses
import graphlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

import numpy as np

from tpuembed.manifest import LOOKUP_SCOPE
from tpuembed.row_proof import elementwise, lookups, reductions, shapes
from tpuembed.row_proof.values import OUTPUTS, ROWS, RULES, Kind, MixedError, NodeCall, Size, Value, same

__all__ = ["Verdict", "prove"]

_LOOKUP: Final = re.compile(rf"(?:.*/)?{LOOKUP_SCOPE}(?:_\d+)?(?=/)")
"""The names of a lookup's operations, in models that hold tpuembed's layers and in its exports: it is one operation here.

Each row of its outputs is looked up by the ids of that row, whatever stands beside or behind them: the layer's own contract.
"""
_WITH_RULES: Final = (elementwise, lookups, reductions, shapes)
"""Each of these modules adds its rules to RULES. An operation that is not in it mixes rows."""
_CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_BRANCHES: Final = frozenset({"If", "StatelessIf"})
_LOOPS: Final = frozenset({"While", "StatelessWhile"})
_EFFECTS: Final = ("Assert", "Assign", "LookupTableInsert", "LookupTableImport", "ResourceScatter")
_SCALARS: Final = frozenset({"AddV2", "Cast", "Maximum", "Minimum", "Mul", "Sub"})
"""Operations that make a scalar of scalars, and do not fail."""
_NEVER_FAIL: Final = frozenset({"Cast", "Identity", "IdentityN", "Shape", "Size"})
_DEPTH: Final = 64
_FAILS: Final = "it always fails"
_NOT_OF_ROWS: Final = "a lookup's ids are not those of the rows"
_WIDE: Final = "a lookup's ids are as wide as the widest row of the run"

_Place = tuple[str, int]
"""A node, and the number of one of its outputs."""


class Verdict(NamedTuple):
    """What is proven of a signature: why requests may not share a run. The reason is empty if they may."""

    reason: str = ""

    @property
    def is_proven(self) -> bool:
        """Returns True if each row of the outputs depends on the same row of the inputs alone."""
        return not self.reason


def prove(meta_graph: Any, name: str, *, is_export: bool = False) -> Verdict:
    """Returns whether requests of a signature may share a run, if their sizes but the first are equal.

    Args:
        meta_graph: a MetaGraphDef.
        name: of the signature.
        is_export: tpuembed wrote it, as its manifest says; lookups are then known by their name scope. In any other SavedModel such
            a name proves nothing.
    """
    signature = meta_graph.signature_def[name]
    walk = _GraphWalk(meta_graph.graph_def.library, is_export)
    fed: dict[_Place, Value] = {}
    for alias, info in sorted(signature.inputs.items()):
        node, _, index = info.name.partition(":")
        shape = info.tensor_shape
        if not node or (not shape.unknown_rank and (not shape.dim or shape.dim[0].size >= 0)):
            return Verdict(f"input {alias!r} has no first axis of any size")
        fed[node, int(index or 0)] = Value(Kind.ROWS, None if shape.unknown_rank else walk.rows_of(shape))
    if not fed:
        return Verdict("it has no inputs")
    body = _Body(meta_graph.graph_def.node, fed, is_export)
    outputs = sorted(signature.outputs.items())
    if not all(info.name for _, info in outputs):
        return Verdict("an output is made of several tensors")
    try:
        found, effect = walk.run(body, [body.source(info.name) for _, info in outputs], [])
    except MixedError as error:
        return Verdict(str(error))
    for (alias, _), value in zip(outputs, found, strict=True):
        if effect or value.kind is Kind.MIXED:
            reason = effect or value.reason
        elif value.kind is Kind.SAME:
            reason = "it has no rows: it is made of no input"
        elif value.kind is not Kind.ROWS:
            reason = f"it is {value.kind.value}"
        elif value.axis != 0 or (value.shape is not None and value.shape[0] != ROWS):
            reason = "its first axis is not that of the rows"
        elif value.is_padded:
            reason = "it is as wide as the widest row of the run"
        else:
            continue
        return Verdict(f"output {alias!r}: {reason}")
    return Verdict()


class _Lookup(NamedTuple):
    """One lookup of tpuembed."""

    inputs: Sequence[str]  # of its operations, as a node names them, but for those that are operations of its own
    singly: Set[_Place]  # those that are looked up one by one; see `_looked_up_singly`


class _Body:
    """The nodes of a graph or a function, what is known of its inputs, and the lookup that a node is of."""

    def __init__(self, nodes: Iterable[Any], fed: Mapping[_Place, Value], is_export: bool) -> None:
        self.nodes, self.fed = {node.name: node for node in nodes}, fed
        self.lookups: dict[str, _Lookup] = {}
        nodes_of: dict[str, list[Any]] = {}
        for node in self.nodes.values() if is_export else ():
            if match := _LOOKUP.match(node.name):
                nodes_of.setdefault(match[0], []).append(node)
        for own in nodes_of.values():
            names = {node.name for node in own}
            given = dict.fromkeys(name for node in own for name in node.input)
            inputs = [name for name in given if self.source(name.removeprefix("^"))[0] not in names]
            self.lookups |= dict.fromkeys(names, _Lookup(inputs, _looked_up_singly(self, own)))

    def source(self, name: str) -> _Place:
        """The place of an output: `node:2`, or `node:output_name:2` within a function."""
        first, _, rest = name.partition(":")
        arg, _, index = rest.rpartition(":")
        offset = 0
        node = self.nodes.get(first)
        if arg and node is not None and node.op in OUTPUTS:
            for output, count in OUTPUTS[node.op](node):
                if output == arg:
                    break
                offset += count
        return first, offset + int(index or 0)

    def sources(self, names: Iterable[str]) -> list[_Place]:
        """The places of inputs, without those that are only waited for."""
        return [self.source(name) for name in names if not name.startswith("^")]

    def inputs(self, name: str) -> Sequence[str]:
        """The inputs of a node, or of the lookup that it is of."""
        found: Sequence[str] = self.lookups[name].inputs if name in self.lookups else self.nodes[name].input
        return found


class _GraphWalk:
    """Values of the nodes of a graph, in the order in which they run."""

    def __init__(self, library: Any, is_export: bool) -> None:
        self._is_export = is_export
        self._functions = {function.signature.name: function for function in library.function}
        self._counter = itertools.count(1)
        self._depth = 0

    def symbol(self, kind: str) -> Size:
        """A new symbol, of a kind that `values` names."""
        return Size.symbol(f"{kind}{next(self._counter)}")

    def rows_of(self, shape: Any) -> tuple[Size, ...]:
        """The sizes of rows of this TensorShapeProto, whatever its first size is."""
        return (ROWS, *(Size.of(dim.size) if dim.size >= 0 else self.symbol("s") for dim in shape.dim[1:]))

    def run(self, body: _Body, wanted: Sequence[_Place], effects: Sequence[str]) -> tuple[list[Value], str]:
        """Values of the tensors `wanted`; and why none of them may be relied on, because of what the nodes `effects` do."""
        found: dict[str, Sequence[Value]] = {}  # one value stands for all outputs of a node
        bad: dict[str, str] = {}
        needs: dict[str, list[str]] = {}
        pending = [*(name for name, _ in wanted), *effects]
        while pending:
            name = pending.pop()
            if name not in needs and name in body.nodes:
                inputs = [] if (name, 0) in body.fed else body.inputs(name)
                needs[name] = [body.source(one.removeprefix("^"))[0] for one in inputs]
                pending += needs[name]
        try:
            order = [name for name in graphlib.TopologicalSorter(needs).static_order() if name in needs]
        except graphlib.CycleError:
            raise MixedError("it has a loop, of the form that TensorFlow 1 writes") from None
        for name in order:
            if (name, 0) not in body.fed:
                self._evaluate(body, name, found, bad)
        for name in effects:
            bad[name] = bad.get(name) or _hidden(body, name, found)
        reasons = [reason for reason in bad.values() if reason]
        effect = _FAILS if _FAILS in reasons else next(iter(reasons), "")
        return [_value(body, place, found) for place in wanted], effect

    def _evaluate(self, body: _Body, name: str, found: dict[str, Sequence[Value]], bad: dict[str, str]) -> None:
        node = body.nodes[name]
        places = body.sources(body.inputs(name))
        inputs = [_value(body, place, found) for place in places]
        waits = [one[1:] for one in body.inputs(name) if one.startswith("^")]
        reason = next(filter(None, [bad.get(one) or _hidden(body, one, found) for one in waits]), "")
        if name in body.lookups:  # its inputs must be ids, sparse and ragged ones too
            reason = reason or _unfit(inputs, [place in body.lookups[name].singly for place in places])
            no_rows = Value(Kind.MIXED, reason=reason or "a lookup's output has no axis of rows")
            shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr and not reason else []
            made = [
                Value(Kind.ROWS, self.rows_of(one)) if one.dim and one.dim[0].size < 0 else no_rows for one in shapes
            ]
            found[name], bad[name] = made or [no_rows], reason
            return
        try:
            found[name], bad[name] = self._outputs(node, inputs, places)
        except MixedError as error:
            bad[name] = f"{name} ({node.op}): {error}"
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # of no form that the rules know
            bad[name] = f"{name} ({node.op}): its form is not known"
        if reason := reason or ("" if name in found else bad[name]):
            found[name] = [Value(Kind.MIXED, reason=reason)]

    def _outputs(self, node: Any, inputs: list[Value], places: Sequence[_Place]) -> tuple[list[Value], str]:
        """A node's outputs, and what is wrong with its effect."""
        if node.op == "Assert":
            condition = inputs[0]
            if condition.kind is Kind.SAME:
                is_false = condition.array is not None and condition.array.size and not condition.array.all()
                return [], _FAILS if is_false else ""
            if condition.kind in (Kind.EVERY, Kind.ROWS):  # a run fails exactly when one of its rows does
                return [], ""
            raise MixedError(condition.reason or f"what it asserts {condition.kind.value}")
        if node.op == "NoOp":
            return [], ""
        if node.op in _CALLS:
            return self.call(node.attr["f"].func.name, inputs)
        if node.op in _BRANCHES:
            return self._branch(node, inputs, places)
        if node.op in _LOOPS:
            return self._loop(node, inputs), ""
        rule = RULES.get(node.op)
        if rule is None:
            raise MixedError("it is not in the table of operations")
        first = next((value for value in inputs if value.kind is Kind.MIXED), None)
        if first is not None:
            is_scalar = node.op in _SCALARS and all(value.shape == () for value in inputs)
            found = Value(Kind.MIXED, () if is_scalar else None, reason=first.reason)
            if is_scalar and node.op in ("Maximum", "Minimum"):
                found = _bounded(node.op, first, inputs[inputs[0] is first])
            # All others may fail by what is in the run, also where only a message of an assertion has their values.
            return [found], "" if is_scalar or node.op in _NEVER_FAIL else first.reason
        call = NodeCall(node, inputs, self.symbol)
        try:
            made = rule(call)
        except MixedError:
            if not call.is_same:
                raise
            made = same()  # an operation with a rule makes the same of the same, even if it is not known of what shape
        return [made] if isinstance(made, Value) else made, ""

    # ---- functions

    def call(self, name: str, inputs: Sequence[Value]) -> tuple[list[Value], str]:
        """Return the values that a function of the library returns, and what is wrong with its effects."""
        function = self._functions.get(name)
        if function is None or self._depth > _DEPTH:
            raise MixedError(f"function {name!r} is not known")
        names = [(argument.name, 0) for argument in function.signature.input_arg]
        body = _Body(function.node_def, dict(zip(names, inputs, strict=True)), self._is_export)
        wanted = [body.source(function.ret[output.name]) for output in function.signature.output_arg]
        effects = [body.source(one)[0] for one in function.control_ret.values()]
        effects += [node.name for node in function.node_def if node.op.startswith(_EFFECTS)]
        self._depth += 1
        try:
            return self.run(body, wanted, effects)
        finally:
            self._depth -= 1

    def _branch(self, node: Any, inputs: list[Value], places: Sequence[_Place]) -> tuple[list[Value], str]:
        condition, *arguments = inputs
        names = [node.attr[branch].func.name for branch in ("then_branch", "else_branch")]
        if condition.kind is Kind.MIXED:
            raise MixedError(condition.reason)
        if condition.kind not in (Kind.SAME, Kind.EVERY, Kind.SOME) or condition.shape != ():
            raise MixedError("which branch is taken depends on rows")
        if condition.array is not None:
            return self.call(names[0] if bool(condition.array) else names[1], arguments)
        if condition.kind is Kind.SAME:  # one of them, the same in every run
            (found, wrong), (other, other_wrong) = [self.call(name, arguments) for name in names]
            joined = [_join(a, b, lambda _: self.symbol("s")) for a, b in zip(found, other, strict=True)]
            return joined, next((each for each in (wrong, other_wrong) if each not in ("", _FAILS)), "")
        good = 0 if condition.kind is Kind.EVERY else 1
        outcomes = []
        for index, name in enumerate(names):
            known = same((), array=np.array(index == 0))
            bound = [known if place == places[0] else value for value, place in zip(arguments, places[1:], strict=True)]
            outcomes.append(self.call(name, bound))
        if outcomes[1 - good][1] != _FAILS:
            raise MixedError("which branch is taken depends on all rows")
        return outcomes[good]

    def _loop(self, node: Any, inputs: Sequence[Value]) -> list[Value]:
        """Return what holds of the tensors that a loop keeps, however often its body runs."""
        state = [
            dataclasses.replace(value, array=None, fill=None, sizes=value.sizes if value.kind is Kind.SIZE else None)
            for value in inputs
        ]
        number = next(self._counter)
        for _ in range(6):
            (condition,), wrong = self.call(node.attr["cond"].func.name, state)
            if condition.kind is not Kind.SAME or condition.shape != ():
                raise MixedError(condition.reason or "how often it runs depends on rows")
            found, other = self.call(node.attr["body"].func.name, state)
            if wrong or other:
                raise MixedError(wrong or other)
            joined = [
                _join(a, b, lambda axis, index=index: Size.symbol(f"s{number}.{index}.{axis}"))  # type: ignore[misc]
                for index, (a, b) in enumerate(zip(state, found, strict=True))
            ]
            if joined == state:
                return state
            state = joined
        raise MixedError("what it keeps changes its form")


def _value(body: _Body, place: _Place, found: Mapping[str, Sequence[Value]]) -> Value:
    if place in body.fed:
        return body.fed[place]
    values = found.get(place[0], ())
    index = place[1] if len(values) > 1 else 0
    missing = f"{place[0]}: it has no such output"
    return values[index] if index < len(values) else Value(Kind.MIXED, reason=missing)


def _hidden(body: _Body, name: str, found: Mapping[str, Sequence[Value]]) -> str:
    """Why a node that others wait for may succeed or fail by what else is in a run; empty where it may not."""
    node = body.nodes.get(name)
    if node is None or name in body.lookups or node.op in _CALLS | _BRANCHES | _LOOPS:  # they are looked into
        return ""
    return next((value.reason for value in found.get(name, ()) if value.kind is Kind.MIXED), "")


def _bounded(op: str, unknown: Value, size: Value) -> Value:
    """The size that a mixed scalar, whose `sizes` are lower bounds, is bounded to from both sides, as TensorFlow bounds counts."""
    if size.kind in (Kind.SAME, Kind.SIZE) and size.sizes is not None:
        if op == "Maximum":
            return dataclasses.replace(unknown, sizes=size.sizes)
        if unknown.sizes is not None and unknown.sizes[0].at_least(size.sizes[0]):
            return size
    return Value(Kind.MIXED, (), reason=unknown.reason)


_KEEP_IDS: Final = ("Cast", "EnsureShape", "Identity", "IdentityN", "Maximum", "Minimum", "Select", "SelectV2")
"""Operations that a lookup may apply to ids before it looks them up one by one."""


def _looked_up_singly(body: _Body, nodes: Sequence[Any]) -> set[_Place]:
    """Return what a lookup of `nodes` makes a vector of: dense ids, of which each has a row of its own. It never makes one of
    the parts of sparse and ragged ids, nor of lists of ids.
    """
    kept = [((node.name, 0), body.sources(node.input)) for node in nodes if node.op in _KEEP_IDS]
    found: set[_Place] = set()
    more = {body.sources(node.input)[0] for node in nodes if node.op == "Reshape"}
    while more - found:
        found |= more
        more = {source for place, sources in kept if place in found for source in sources}
    return found


def _unfit(values: Sequence[Value], singly: Sequence[bool]) -> str:
    """Why a lookup may not have these inputs: ids of rows, or the parts of sparse and ragged ones. Dense ids are `singly`."""
    entries = {ROWS}
    for value, is_single in zip(values, singly, strict=True):
        if value.kind is Kind.MIXED:
            return value.reason
        if is_single and (value.is_padded or value.kind not in (Kind.SAME, Kind.HANDLE, Kind.SIZE, Kind.ROWS)):
            return _WIDE if value.is_padded else f"a lookup's dense ids are {value.kind.value}"
        if is_single and value.kind is Kind.ROWS and (value.shape is None or value.shape[0] != ROWS):
            return _NOT_OF_ROWS
        if value.kind in (Kind.INDICES, Kind.POINTER) and value.target == ROWS and value.axis == 0 and value.shape:
            if value.kind is Kind.INDICES and value.shape[1].number != 2 and _is_wide_inside(value.sizes):
                return _WIDE
            entries.add(value.shape[0])
        elif value.kind is Kind.SPLITS and value.shape == (ROWS + Size.of(1),) and value.target is not None:
            entries.add(value.target)
        elif value.kind is Kind.SIZE and value.rank != 0:
            if value.sizes is None or value.sizes[:1] != (ROWS,):
                return _NOT_OF_ROWS
            if _is_wide_inside(value.sizes):
                return _WIDE
        elif value.kind not in (Kind.SAME, Kind.HANDLE, Kind.SIZE, Kind.ROWS):
            return f"a lookup's input is {value.kind.value}"
    if not any(value.kind is Kind.ROWS for value in values):
        return "a lookup has no ids of rows"
    for value in values:
        if value.kind is Kind.SAME and (value.shape is None or any(size.number is None for size in value.shape)):
            return "a lookup's ids may be constant ones"
        if value.kind is not Kind.ROWS:
            continue
        if value.shape is None or value.axis != 0 or value.shape[0] not in (entries if value.rank == 1 else {ROWS}):
            return _NOT_OF_ROWS
        if value.is_padded and (value.fill is None or value.fill not in (-1, 0, b"")):
            return "a lookup's ids have no padding"
    return ""


def _is_wide_inside(sizes: Sequence[Size] | None) -> bool:
    """Returns True if sparse ids of these sizes may have a padded one in an axis between the first and the last."""
    return not sizes or any(size.has("w") for size in sizes[1:-1])


def _join(one: Value, other: Value, symbol: Callable[[int], Size]) -> Value:
    """Return what is known of a tensor that is one of two, the same one in every run. `symbol` makes a size of an axis."""
    for value in (one, other):
        if value.kind is Kind.MIXED:
            return value
    if one == other:  # but for their values, which are not compared
        return dataclasses.replace(one, array=None, fill=None)
    if one.kind is other.kind is Kind.LIST and None in (one.element, other.element) and one.declared == other.declared:
        return one if other.element is None else other
    if one.kind is not other.kind or one.kind not in (Kind.SAME, Kind.ROWS) or one.axis != other.axis:
        return Value(Kind.MIXED, reason=f"it is {one.kind.value} in one case, and {other.kind.value} in another")
    shape = None
    if one.shape is not None and other.shape is not None and one.rank == other.rank:
        pairs = list(zip(one.shape, other.shape, strict=True))
        if all(a == b or (a.is_same and b.is_same) for a, b in pairs):
            shape = tuple(a if a == b else symbol(axis) for axis, (a, b) in enumerate(pairs))
    if one.kind is Kind.SAME:
        return same(shape, one.sizes if one.sizes == other.sizes else None)
    if shape is None or one.is_padded or other.is_padded:
        return Value(Kind.MIXED, reason="its rows have other sizes in one case than in another")
    return Value(Kind.ROWS, shape, one.axis)
