"""Follows a signature's tensors through its graph, its functions, branches and loops."""

import dataclasses
import graphlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

import numpy as np

from tpuembed.manifest import LOOKUP_SCOPE
from tpuembed.row_proof import elementwise, lookups, reductions, shapes, tensor_lists
from tpuembed.row_proof.rules import OUTPUTS, RULES, NodeCall
from tpuembed.row_proof.values import ROWS, Kind, MixedError, Size, Value, mixed, same

__all__ = ["Verdict", "prove"]

_LOOKUP: Final = re.compile(rf"(?:.*/)?{LOOKUP_SCOPE}(?:_\d+)?(?=/)")
"""The names of a lookup's operations, in models that hold tpuembed's layers and in its exports: it is one operation here.

Each row of its outputs is looked up by the ids of that row, whatever stands beside or behind them: the layer's own contract.
"""
_WITH_RULES: Final = (elementwise, lookups, reductions, shapes, tensor_lists)
"""Each of these modules adds its rules to RULES. An operation that is not in it mixes rows."""
_CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_BRANCHES: Final = frozenset({"If", "StatelessIf"})
_LOOPS: Final = frozenset({"While", "StatelessWhile"})
_EFFECTS: Final = ("Assert", "Assign", "LookupTableInsert", "LookupTableImport", "ResourceScatter")
_SCALARS: Final = frozenset({"AddV2", "Cast", "Mul", "Sub"})
"""Operations that make a scalar of scalars."""
_DEPTH: Final = 64


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
    fed: dict[tuple[str, int], Value] = {}
    for alias, info in sorted(signature.inputs.items()):
        node, _, index = info.name.partition(":")
        shape = info.tensor_shape
        if not node or (not shape.unknown_rank and (not shape.dim or shape.dim[0].size >= 0)):
            return Verdict(f"input {alias!r} has no first axis of any size")
        known = None
        if not shape.unknown_rank:
            known = (ROWS, *(Size.of(dim.size) if dim.size >= 0 else walk.symbol("s") for dim in shape.dim[1:]))
        fed[node, int(index or 0)] = Value(Kind.ROWS, known)
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
        if reason := effect or _reason(value):
            return Verdict(f"output {alias!r}: {reason}")
    return Verdict()


def _reason(value: Value) -> str:
    """Why an output may not be taken apart by rows; empty where it may."""
    if value.kind is Kind.MIXED:
        return value.reason
    if value.kind is Kind.SAME:
        return "it has no rows: it is made of no input"
    if value.kind is not Kind.ROWS:
        return f"it is {value.kind.value}"
    if value.axis != 0 or (value.shape is not None and value.shape[0] != ROWS):
        return "its first axis is not that of the rows"
    return "it is as wide as the widest row of the run" if value.is_padded else ""


class _Lookup(NamedTuple):
    """One lookup of tpuembed.

    Attributes:
        inputs: the inputs of its operations that are no operations of its own, as a node names them.
        singly: the nodes and numbers of those inputs that are looked up one by one; see `_looked_up_singly`.
    """

    inputs: Sequence[str]
    singly: Set[tuple[str, int]]


class _Body:
    """The nodes of a graph or a function, and what is known of its inputs."""

    def __init__(self, nodes: Iterable[Any], fed: Mapping[tuple[str, int], Value], is_export: bool) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.fed = dict(fed)
        self._lookup_of: dict[str, str] = {}
        nodes_of: dict[str, list[Any]] = {}
        for node in self.nodes.values():
            match = _LOOKUP.match(node.name) if is_export else None
            if match:
                self._lookup_of[node.name] = match[0]
                nodes_of.setdefault(match[0], []).append(node)
        self._lookups = {lookup: self._found(lookup, nodes) for lookup, nodes in nodes_of.items()}

    def _found(self, lookup: str, nodes: Sequence[Any]) -> _Lookup:
        names = dict.fromkeys(name for node in nodes for name in node.input)
        inputs = [name for name in names if self._lookup_of.get(self.source(name.removeprefix("^"))[0]) != lookup]
        return _Lookup(inputs, _looked_up_singly(self, nodes, inputs))

    def lookup(self, name: str) -> _Lookup | None:
        """Return the lookup that a node is of."""
        lookup = self._lookup_of.get(name)
        return None if lookup is None else self._lookups[lookup]

    def source(self, name: str) -> tuple[str, int]:
        """The node and the number of an output: `node:2`, or `node:output_name:2` within a function."""
        first, _, rest = name.partition(":")
        if not rest:
            return first, 0
        arg, _, index = rest.rpartition(":")
        if not arg:
            return first, int(rest)
        offset = 0
        node = self.nodes.get(first)
        if node is not None and node.op in OUTPUTS:
            for output, count in OUTPUTS[node.op](node):
                if output == arg:
                    break
                offset += count
        return first, offset + int(index)


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

    def run(self, body: _Body, wanted: Sequence[tuple[str, int]], effects: Sequence[str]) -> tuple[list[Value], str]:
        """Values of the tensors `wanted`; and why none of them may be relied on, because of what nodes in `effects` do.

        Args:
            body: what is run.
            wanted: node and number of each tensor.
            effects: nodes that are run besides.
        """
        found: dict[str, _Outputs] = {}
        bad: dict[str, str] = {}
        for name in self._order(body, [*(name for name, _ in wanted), *effects]):
            self._evaluate(body, name, found, bad)
        for name in effects:
            bad[name] = bad.get(name) or _hidden(body, name, found)
        reasons = [reason for reason in bad.values() if reason]
        effect = _FAILS if _FAILS in reasons else next(iter(reasons), "")
        return [self._value(body, place, found) for place in wanted], effect

    def _order(self, body: _Body, roots: Iterable[str]) -> list[str]:
        """The nodes that `roots` need, each after those that it needs itself."""
        needs: dict[str, list[str]] = {}
        pending = list(roots)
        while pending:
            name = pending.pop()
            if name not in needs and name in body.nodes:
                needs[name] = self._needs(body, name)
                pending += needs[name]
        try:
            return [name for name in graphlib.TopologicalSorter(needs).static_order() if name in needs]
        except graphlib.CycleError:
            raise MixedError("it has a loop, of the form that TensorFlow 1 writes") from None

    def _needs(self, body: _Body, name: str) -> list[str]:
        if (name, 0) in body.fed:
            return []
        lookup = body.lookup(name)
        inputs = body.nodes[name].input if lookup is None else lookup.inputs
        return [body.source(one.removeprefix("^"))[0] for one in inputs]

    def _value(self, body: _Body, place: tuple[str, int], found: Mapping[str, "_Outputs"]) -> Value:
        if place in body.fed:
            return body.fed[place]
        values = found.get(place[0], ())
        if isinstance(values, Value):
            return values
        return values[place[1]] if place[1] < len(values) else mixed(f"{place[0]}: it has no such output")

    def _evaluate(self, body: _Body, name: str, found: "dict[str, _Outputs]", bad: dict[str, str]) -> None:
        node = body.nodes[name]
        if (name, 0) in body.fed:
            return
        lookup = body.lookup(name)
        if lookup is not None:
            found[name], bad[name] = self._looked_up(body, node, lookup, found, bad)
            return
        places = [body.source(one) for one in node.input if not one.startswith("^")]
        inputs = [self._value(body, place, found) for place in places]
        waits = [one[1:] for one in node.input if one.startswith("^")]
        reasons = [bad.get(one) or _hidden(body, one, found) for one in waits]
        try:
            found[name], bad[name] = self._outputs(node, inputs, places)
        except MixedError as error:
            bad[name] = f"{name} ({node.op}): {error}"
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # of no form that the rules know
            bad[name] = f"{name} ({node.op}): its form is not known"
        reason = next(filter(None, [*reasons, "" if name in found else bad[name]]), "")
        if reason:
            found[name] = mixed(reason)

    def _outputs(self, node: Any, inputs: list[Value], places: Sequence[tuple[str, int]]) -> "tuple[_Outputs, str]":
        """A node's outputs, and what is wrong with its effect."""
        if node.op == "Assert":
            wrong = _assertion(inputs[0])
            return [], wrong if wrong in ("", _FAILS) else f"{node.name} (Assert): {wrong}"
        if node.op == "NoOp":
            return [], ""
        if node.op in _CALLS:
            return self.call(node.attr["f"].func.name, inputs)
        if node.op in _BRANCHES:
            return self._branch(node, inputs, places)
        if node.op in _LOOPS:
            return self._loop(node, inputs), ""
        first = next((value for value in inputs if value.kind is Kind.MIXED), None)
        if first is not None and node.op in ("Maximum", "Minimum"):
            return _bounded(node, *inputs), ""
        rule = RULES.get(node.op)
        if rule is None:
            raise MixedError("it is not in the table of operations")
        if first is not None:
            known = () if node.op in _SCALARS and all(value.shape == () for value in inputs) else None
            return Value(Kind.MIXED, known, reason=first.reason), ""
        return rule(NodeCall(node, inputs, self.symbol)), ""

    # ---- functions

    def call(self, name: str, inputs: Sequence[Value]) -> tuple[list[Value], str]:
        """Return the values that a function of the library returns, and what is wrong with its effects."""
        function = self._functions.get(name)
        if function is None or self._depth > _DEPTH:
            raise MixedError(f"function {name!r} is not known")
        names = [argument.name for argument in function.signature.input_arg]
        body = _Body(
            function.node_def, {(arg, 0): value for arg, value in zip(names, inputs, strict=True)}, self._is_export
        )
        wanted = [body.source(function.ret[output.name]) for output in function.signature.output_arg]
        effects = [body.source(one)[0] for one in function.control_ret.values()]
        effects += [node.name for node in function.node_def if node.op.startswith(_EFFECTS)]
        self._depth += 1
        try:
            return self.run(body, wanted, effects)
        finally:
            self._depth -= 1

    def _branch(self, node: Any, inputs: list[Value], places: Sequence[tuple[str, int]]) -> tuple[list[Value], str]:
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
        symbols: dict[tuple[int, int], Size] = {}

        def varying(index: int) -> Callable[[int], Size]:
            return lambda axis: symbols.setdefault((index, axis), self.symbol("s"))

        for _ in range(6):
            (condition,), wrong = self.call(node.attr["cond"].func.name, state)
            if condition.kind is not Kind.SAME or condition.shape != ():
                raise MixedError(condition.reason or "how often it runs depends on rows")
            found, other = self.call(node.attr["body"].func.name, state)
            if wrong or other:
                raise MixedError(wrong or other)
            joined = [_join(a, b, varying(index)) for index, (a, b) in enumerate(zip(state, found, strict=True))]
            if joined == state:
                return state
            state = joined
        raise MixedError("what it keeps changes its form")

    # ---- lookups of tpuembed

    def _looked_up(
        self, body: _Body, node: Any, lookup: _Lookup, found: "Mapping[str, _Outputs]", bad: Mapping[str, str]
    ) -> "tuple[_Outputs, str]":
        """The outputs of a node of a lookup, and why it is none of rows: its inputs must be ids, sparse and ragged ones too."""
        waits = [name[1:] for name in lookup.inputs if name.startswith("^")]
        reasons = [bad.get(name) or _hidden(body, name, found) for name in waits]
        places = [body.source(name) for name in lookup.inputs if not name.startswith("^")]
        values = [self._value(body, place, found) for place in places]
        reasons.append(_unfit(values, [place in lookup.singly for place in places]))
        reason = next(filter(None, reasons), "")
        if reason:
            return mixed(reason), reason
        shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else []
        return [self._activations(shape) for shape in shapes], ""

    def _activations(self, shape: Any) -> Value:
        if shape.unknown_rank or not shape.dim or shape.dim[0].size >= 0:
            return mixed("a lookup's output has no axis of rows")
        return Value(Kind.ROWS, (ROWS, *(Size.of(d.size) if d.size >= 0 else self.symbol("s") for d in shape.dim[1:])))


_FAILS: Final = "it always fails"
_Outputs = Sequence[Value] | Value
"""The outputs of a node, or the one value that every output has."""


def _hidden(body: _Body, name: str, found: Mapping[str, _Outputs]) -> str:
    """Why a node that others wait for may succeed or fail by what else is in a run; empty where it may not."""
    node = body.nodes.get(name)
    if node is None or body.lookup(name) is not None or node.op in _CALLS | _BRANCHES | _LOOPS:  # they are looked into
        return ""
    values = found.get(name, ())
    return next(
        (one.reason for one in ([values] if isinstance(values, Value) else values) if one.kind is Kind.MIXED), ""
    )


def _bounded(node: Any, one: Value, other: Value) -> Value:
    """Return the size that a value is bounded to from both sides. TensorFlow bounds the length of a count this way.

    The `sizes` of a mixed value are its lower bounds.
    """
    unknown, size = (one, other) if one.kind is Kind.MIXED else (other, one)
    if unknown.shape == () and size.kind in (Kind.SAME, Kind.SIZE) and size.sizes is not None and size.shape == ():
        if node.op == "Maximum":
            return dataclasses.replace(unknown, sizes=size.sizes)
        if unknown.sizes is not None and unknown.sizes[0].at_least(size.sizes[0]):
            return size
    return mixed(unknown.reason)


_KEEP_IDS: Final = frozenset(
    {"Cast", "EnsureShape", "Identity", "IdentityN", "Maximum", "Minimum", "Select", "SelectV2"}
)
"""Operations that a lookup may apply to ids before it looks them up one by one."""


def _looked_up_singly(body: _Body, nodes: Sequence[Any], inputs: Iterable[str]) -> set[tuple[str, int]]:
    """Return which inputs of a lookup of `nodes` are dense ids, of which each has a row of its own: it makes a vector of them.

    It never does so with the parts of sparse and ragged ids, nor with lists of ids.
    """
    kept_by: dict[tuple[str, int], list[tuple[str, int]]] = {}
    reshaped = set()
    for node in nodes:
        sources = [body.source(one) for one in node.input if not one.startswith("^")]
        if node.op in _KEEP_IDS:
            for source in sources:
                kept_by.setdefault(source, []).append((node.name, 0))
        elif node.op == "Reshape":
            reshaped.add(sources[0])
    found = set()
    for place in {body.source(name) for name in inputs if not name.startswith("^")}:
        kept, pending = {place}, [place]
        while pending:
            more = [one for one in kept_by.get(pending.pop(), ()) if one not in kept]
            kept.update(more)
            pending += more
        if kept & reshaped:
            found.add(place)
    return found


def _unfit(values: Sequence[Value], singly: Sequence[bool]) -> str:
    """Why a lookup may not have these inputs: ids of rows, or the parts of sparse and ragged ones. Dense ids are `singly`."""
    entries = {ROWS}
    for value, is_single in zip(values, singly, strict=True):
        wide = "a lookup's ids are as wide as the widest row of the run"
        if value.kind is Kind.MIXED:
            return value.reason
        if is_single and (value.is_padded or value.kind not in (Kind.SAME, Kind.HANDLE, Kind.SIZE, Kind.ROWS)):
            return wide if value.is_padded else f"a lookup's dense ids are {value.kind.value}"
        if is_single and value.kind is Kind.ROWS and (value.shape is None or value.shape[0] != ROWS):
            return _NOT_OF_ROWS
        if value.kind in (Kind.INDICES, Kind.POINTER) and value.target == ROWS and value.axis == 0 and value.shape:
            if value.kind is Kind.INDICES and value.shape[1].number != 2 and _is_wide_inside(value.sizes):
                return wide
            entries.add(value.shape[0])
        elif value.kind is Kind.SPLITS and value.shape == (ROWS + Size.of(1),) and value.target is not None:
            entries.add(value.target)
        elif value.kind is Kind.SIZE and value.rank != 0:
            if value.sizes is None or value.sizes[:1] != (ROWS,):
                return _NOT_OF_ROWS
            if _is_wide_inside(value.sizes):
                return wide
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


_NOT_OF_ROWS: Final = "a lookup's ids are not those of the rows"


def _is_wide_inside(sizes: Sequence[Size] | None) -> bool:
    """Returns True if sparse ids of these sizes may have a padded one in an axis between the first and the last."""
    return not sizes or any(size.is_padded for size in sizes[1:-1])


def _assertion(condition: Value) -> str:
    """Return what is wrong with an assertion of `condition`. It is "" if a run fails exactly when one of its rows does."""
    if condition.kind is Kind.SAME:
        if condition.array is not None and condition.array.size and not condition.array.all():
            return _FAILS
        return ""
    if condition.kind in (Kind.EVERY, Kind.MIXED) or condition.kind is Kind.ROWS:
        return condition.reason
    return f"what it asserts {condition.kind.value}"


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
        return mixed(f"it is {one.kind.value} in one case, and {other.kind.value} in another")
    shape = None
    if one.shape is not None and other.shape is not None and one.rank == other.rank:
        pairs = list(zip(one.shape, other.shape, strict=True))
        if all(a == b or (a.is_same and b.is_same) for a, b in pairs):
            shape = tuple(a if a == b else symbol(axis) for axis, (a, b) in enumerate(pairs))
    if one.kind is Kind.SAME:
        return same(shape, one.sizes if one.sizes == other.sizes else None)
    if shape is None or one.is_padded or other.is_padded:
        return mixed("its rows have other sizes in one case than in another")
    return Value(Kind.ROWS, shape, one.axis)
