"""Graphs of exports, made such that TensorFlow's graph optimizer, which is most of the time of a load, has nothing to do.

What the optimizer does for lookups and dense layers is little, and is written here: it puts the functions of a signature in
line, which is now asked of the runtime's own lowering, and it fuses a dense layer's operations. Sources:
lower_functional_ops.cc, and the fused matrix product of remapper.cc.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

__all__ = ["is_lean", "make_lean"]

_INLINED: Final = "_lower_as_multi_device_function"
_NOT_INLINED: Final = "_noinline"
_CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_OUTPUTS: Final = {"BiasAdd": "output", "Relu": "activations"}

_NAMES: Final = """
    AssignVariableOp DestroyResourceOp DisableCopyOnRead ImmutableConst MergeV2Checkpoints ReadVariableOp RestoreV2 SaveV2
    ShardedFilename StaticRegexFullMatch StringJoin VarHandleOp

    Assert Const Identity IdentityN If NoOp PartitionedCall Placeholder StatefulPartitionedCall StatelessIf

    All Any ArgMax AsString Bitcast BroadcastTo Cast ConcatV2 Cumsum DivNoNan EnsureShape Equal ExpandDims Fill FloorDiv
    FloorMod GatherNd GatherV2 Greater GreaterEqual Less LessEqual LogicalAnd LogicalNot LogicalOr Max Maximum Min Minimum
    NotEqual OnesLike Pack ParseExampleV2 Prod Range ResourceGather Reshape SegmentSum Select SelectV2 Shape ShapeN Size Slice
    SparseToDense Split SplitV Squeeze StridedSlice Sum Tile Transpose Unpack UnsortedSegmentSum UpperBound Where ZerosLike

    AddV2 BatchMatMulV2 BiasAdd MatMul Mul RealDiv Relu Rsqrt Sigmoid Softmax Sqrt Sub Tanh
"""
_LEAN_OPS: Final = frozenset(_NAMES.split())
"""Of tables and weights, of structure, of ids and sums of rows, of dense layers: the optimizer does no more for them."""


def is_lean(graph: Any) -> bool:
    """Whether a GraphDef has no operation for which TensorFlow's optimizer may know better than `make_lean`."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    return all(node.op in _LEAN_OPS for body in bodies for node in body)


def make_lean(graph: Any) -> None:
    """Change a GraphDef in place: calls of functions in line, dense layers fused. Its results are the same."""
    functions = {function.signature.name: function for function in graph.library.function}
    for called in _inlined(graph.node, functions):
        _fuse_dense_layers(functions[called])


def _inlined(nodes: Iterable[Any], functions: Any) -> set[str]:
    """Mark the calls among `nodes`, and those in what they call; the names of all that is called."""
    found: set[str] = set()
    for node in nodes:
        name = node.attr["f"].func.name if node.op in _CALLS else ""
        if name and not (_NOT_INLINED in functions[name].attr and functions[name].attr[_NOT_INLINED].b):
            node.attr[_INLINED].b = True
            found |= {name} | (set() if name in found else _inlined(functions[name].node_def, functions))
    return found


def _fuse_dense_layers(function: Any) -> None:
    """Make one operation of each matrix product, its bias and its Relu, as TensorFlow's remapper does."""
    nodes = {node.name: node for node in function.node_def}
    users = _users(function)
    gone = set()
    for bias in [node for node in function.node_def if node.op == "BiasAdd" and len(node.input) == 2]:
        product = nodes.get(_source(bias.input[0]))
        if product is not None and product.op == "MatMul" and _is_fusible(product, users) and _has_rows(bias):
            last = _relu_of(bias, users) or bias
            gone |= {product.name} | ({bias.name} if last is not bias else set())
            _fuse(function, product, bias, last)
    kept = [node for node in function.node_def if node.name not in gone]
    if gone:
        copies = [type(node).FromString(node.SerializeToString()) for node in kept]
        del function.node_def[:]
        function.node_def.extend(copies)


def _users(function: Any) -> dict[str, list[Any]]:
    """By node, the nodes that take its outputs or wait for it; the function's own outputs are None."""
    users: dict[str, list[Any]] = {}
    for node in function.node_def:
        for name in node.input:
            users.setdefault(_source(name), []).append(node)
    for name in (*function.ret.values(), *function.control_ret.values()):
        users.setdefault(_source(name), []).append(None)
    return users


def _source(name: str) -> str:
    """The node that an input is of: `node:output:0`, `^node`, or an argument of the function."""
    return name.removeprefix("^").split(":")[0]


def _is_fusible(node: Any, users: dict[str, list[Any]]) -> bool:
    return len(users[node.name]) == 1 and not any(name.startswith("^") for name in node.input)


def _has_rows(bias: Any) -> bool:
    return "data_format" not in bias.attr or bias.attr["data_format"].s == b"NHWC"


def _relu_of(bias: Any, users: dict[str, list[Any]]) -> Any | None:
    (user, *others) = users.get(bias.name, [None])
    return user if user is not None and not others and user.op == "Relu" and len(user.input) == 1 else None


def _fuse(function: Any, product: Any, bias: Any, last: Any) -> None:
    """Make `last`, which is the bias or its Relu, all of them."""
    inputs = [*product.input, bias.input[1]]
    dtype = product.attr["T"].type
    transposed = {name: name in product.attr and product.attr[name].b for name in ("transpose_a", "transpose_b")}
    _rename_output(function, f"{last.name}:{_OUTPUTS[last.op]}:0", f"{last.name}:product:0")
    fused = [b"BiasAdd"] if last is bias else [b"BiasAdd", b"Relu"]
    last.op = "_FusedMatMul"
    del last.input[:]
    last.input.extend(inputs)
    last.attr.clear()
    last.attr["T"].type = dtype
    for name, value in transposed.items():
        last.attr[name].b = value
    last.attr["fused_ops"].list.s.extend(fused)
    last.attr["num_args"].i = 1
    last.attr["epsilon"].f = 0.0
    last.attr["leakyrelu_alpha"].f = 0.2


def _rename_output(function: Any, old: str, new: str) -> None:
    for node, index in _inputs(function):
        if node.input[index] == old:
            node.input[index] = new
    for name, value in function.ret.items():
        if value == old:
            function.ret[name] = new


def _inputs(function: Any) -> Iterator[tuple[Any, int]]:
    return ((node, index) for node in function.node_def for index in range(len(node.input)))
