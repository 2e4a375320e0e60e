"""All that stands between `strategy.run` and the compiler and is neither TensorFlow's nor the compiler's: each one function.

The document lists them with their sentences. Standard library alone: every environment imports it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

__all__ = ["SHIMS", "sentence"]

SHIMS: Final[dict[str, Callable[..., Any]]] = {}
"""Name -> function, in the order in which a step meets them."""

_RESOURCE = 20  # DataType.DT_RESOURCE
_TOPOLOGY = "TOPOLOGY"
_HOST = "/job:localhost/replica:0/task:0/device:"

F = TypeVar("F", bound=Callable[..., Any])


def _shim(function: F) -> F:
    SHIMS[function.__name__] = function
    return function


def sentence(shim: str) -> str:
    """What `shim` does."""
    text = SHIMS[shim].__doc__ or ""
    return " ".join(text.split("\n\n")[0].split())


# ---- trace: the GraphDef of the traced tf.function


def _nodes(graph: Any) -> Iterator[Any]:
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


@_shim
def made_up_cluster(feature: str, replicas: int, sparse_cores: int) -> Any:
    """The TPUStrategy is TensorFlow's own, made from a cluster resolver with a fabricated topology that counts as initialized."""
    from tests.support.fake_tpu import fake_tpu

    return fake_tpu(feature, replicas, sparse_cores)


@_shim
def width_of_batch(ids: Any) -> Any:
    """The ids of the longest example, which a TPU's program is compiled for once a batch is there, are as many as the spec says."""
    if not hasattr(ids, "dense_shape"):
        return ids
    import tensorflow as tf

    return tf.SparseTensor(ids.indices, ids.values, tf.constant(ids.shape.as_list(), tf.int64))


@_shim
def variables_by_shape(graph: Any, captures: Mapping[str, Any]) -> None:
    """A variable that the step captures becomes a VarHandleOp with its dtype and shape, because no device holds it."""
    firsts: dict[int, str] = {}
    for node in graph.node:
        if node.name in captures:
            outer = captures[node.name]
            data = outer._handle_data.shape_and_type[0]
            name = firsts.setdefault(id(outer), node.name)
            node.Clear()
            node.name, node.op = name, "VarHandleOp"
            node.attr["dtype"].type = data.dtype
            node.attr["shape"].shape.CopyFrom(data.shape)
            node.attr["shared_name"].s = name.encode()


@_shim
def packed_variables(graph: Any) -> None:
    """The replicas' copies or shards of a variable are one packed handle, as they are in eager mode, where steps really run."""
    for node in _nodes(graph):
        if node.op == "TPUReplicatedInput" and node.attr["T"].type == _RESOURCE:
            first = node.input[0]
            del node.input[:]
            node.input.append(first)
            node.attr["N"].i, node.attr["is_packed"].b = 1, True


@_shim
def result_after_updates(graph: Any, output: str, control_outputs: Sequence[str]) -> str:
    """The function's control outputs, its updates, are inputs of its result, because the importer takes no others."""
    node = graph.node.add()
    node.name, node.op = "result_after_updates", "Identity"
    node.attr["T"].type = 1  # float32
    node.input.extend([output, *(f"^{name}" for name in control_outputs)])
    name: str = node.name
    return name


@_shim
def topology_by_name(graph: Any) -> bytes:
    """The topology, binary data that the importer's text form cannot carry, is put in after the import."""
    topologies = set()
    for node in _nodes(graph):
        if node.op == "TPUReplicateMetadata":
            topologies.add(node.attr["topology"].s)
            node.attr["topology"].s = _TOPOLOGY.encode()
    [topology] = topologies
    return bytes(topology)


@_shim
def devices_and_topology(text: str, replicas: int, topology: bytes) -> str:
    """The module names one host and its TPUs, which the runtime would list."""
    names = ["CPU:0", *(f"TPU:{index}" for index in range(replicas)), "TPU_SYSTEM:0"]
    devices = ", ".join(f'"{_HOST}{name}"' for name in names)
    escaped = "".join(f"\\{byte:02X}" for byte in topology)
    text = text.replace(f'"{_TOPOLOGY}"', f'"{escaped}"')
    return text.replace("module attributes {", f"module attributes {{tf.devices = {{{devices}}}, ", 1)


# ---- lower: the module that TensorFlow's bridge made


@_shim
def one_program(text: str, program: str) -> str:
    """Each TPU program becomes a module of its own, without the host's program around it."""
    functions = dict(_functions(text))
    wanted, queue = {program}, [program]
    while queue:
        for name in re.findall(r"@([\w.]+)", functions[queue.pop()]):
            if name in functions and name not in wanted:
                wanted.add(name)
                queue.append(name)
    body = "".join(functions[name] for name in functions if name in wanted)
    body = re.sub(rf"func\.func private @{re.escape(program)}\(", "func.func @main(", body, count=1)
    return text[: text.index("\n") + 1] + body + "}\n"


def _functions(text: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"^  func\.func (?:private )?@([\w.]+)\(.*?^  }\n", text, re.MULTILINE | re.DOTALL):
        yield found.group(1), found.group(0)


@_shim
def bounds_as_sizes(text: str) -> str:
    """Buffers of bounded size, which only the TPU runtime gives their size, get the size of their bound."""
    return re.sub(r"tensor<\?x(\w+), #mhlo\.type_extensions<bounds = \[(\d+)\]>>", r"tensor<\2x\1>", text)


# ---- compile: StableHLO as TensorFlow 2.19 writes it, for the compiler of today


@_shim
def no_annotations(text: str) -> str:
    """What the bridge notes of arguments, that they lie on the one device of their replica and are equal in all, is left out."""
    text = re.sub(r'(, )?mhlo\.sharding = "[^"]*"|(, )?mhlo\.is_same_data_across_replicas = true', "", text)
    return re.sub(r" \{\}(?=[,)])", "", text.replace(" {, ", " {"))


@_shim
def all_reduce(text: str) -> str:
    """`cross-replica-sum`, which has no StableHLO name, is written as the all_reduce with addition that it is."""
    pattern = r'"stablehlo\.cross-replica-sum"\((%[\w#]+)\) <\{replica_groups = (.*?)\}> : \((tensor<[^>]*>)\) -> tensor<[^>]*>'
    return re.sub(pattern, lambda found: _sum_of_replicas(*found.groups()), text)


def _sum_of_replicas(operand: str, groups: str, kind: str) -> str:
    scalar = f"tensor<{kind[len('tensor<') : -1].split('x')[-1]}>"
    body = f"^bb0(%a: {scalar}, %b: {scalar}): %s = stablehlo.add %a, %b : {scalar} stablehlo.return %s : {scalar}"
    return f'"stablehlo.all_reduce"({operand}) <{{replica_groups = {groups}}}> ({{ {body} }}) : ({kind}) -> {kind}'


@_shim
def replicas_of_module(text: str, replicas: int) -> str:
    """The module says for how many replicas it is."""
    attributes = f"mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replicas} : i32"
    return re.sub(
        r"^module attributes \{.*\} \{$", f"module @step attributes {{{attributes}}} {{", text, count=1, flags=re.M
    )
