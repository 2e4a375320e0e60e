"""Structural checks of lowered steps: that what compiles is the step that the layer was asked for.

Each takes a cell and its programs, and raises CheckError; the broken variants show that each can.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.tpu.cells import Cell
from tests.tpu.expected import CONSTANTS, LEARNING_RATE, SLOTS, buffer_lengths, model_of, stacks
from tests.tpu.host import check_buffers_of_hosts, check_stamps_of_host
from tests.tpu.program import Argument, Operation, Program

__all__ = ["CHECKS", "CheckError", "failures"]

LOOKUP: Final = "SparseDenseMatmulWithMinibatchingOp"
UPDATE: Final = "SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp"
_BUILDERS: Final = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "AdagradMomentum": "adagrad_momentum",
    "Adam": "adam",
    "FTRL": "ftrl",
}
_OVERLAPPED = 3  # a pipelined step stands in the loop and in its beginning or end


class CheckError(Exception):
    """A lowered step is not what it must be."""


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise CheckError(message)


def _equal(what: str, found: object, wanted: object) -> None:
    _demand(found == wanted, f"{what}: {found}, not {wanted}")


Programs = Sequence[Program]


def _calls(programs: Programs, target: str) -> list[tuple[Program, Operation]]:
    return [(program, call) for program in programs for call in program.calls(target)]


# ---- SparseCores


def number_of_lookups(cell: Cell, programs: Programs) -> None:
    """One lookup per stack and step."""
    times = _OVERLAPPED if cell.pipelining else 1
    _equal("lookups", len(_calls(programs, LOOKUP)), times * len(stacks(cell)))


def number_of_updates(cell: Cell, programs: Programs) -> None:
    """One update per stack and training step; none in an evaluation."""
    times = (_OVERLAPPED if cell.pipelining else 1) if cell.training else 0
    _equal("updates", len(_calls(programs, UPDATE)), times * len(stacks(cell)))


def shapes_of_tables(cell: Cell, programs: Programs) -> None:
    """Lookups and updates take the shards of the stacks, each of its own, with as many slots as the optimizer has."""
    wanted = Counter(_kind(stack.shape) for stack in stacks(cell))
    times = _OVERLAPPED if cell.pipelining else 1
    shards = Counter({kind: times * count for kind, count in wanted.items()})
    _equal("lookups in", Counter(call.kinds()[5] for _, call in _calls(programs, LOOKUP)), shards)
    updated = [re.findall(r"tensor<[^>]*>", call.kinds()[5]) for _, call in _calls(programs, UPDATE)]
    _equal("updates of", Counter(kinds[0] for kinds in updated), shards if cell.training else Counter())
    for kinds in updated:
        _equal("a table and its slots", kinds, [kinds[0]] * (1 + SLOTS[cell.optimizer]))


def lengths_of_buffers(cell: Cell, programs: Programs) -> None:
    """Row pointers, ids and gains have the lengths that the SparseCores and the samples ask for."""
    by_width = {stack.shape[1]: stack for stack in stacks(cell)}
    for _, call in [*_calls(programs, LOOKUP), *_calls(programs, UPDATE)]:
        stack = by_width[call.width()]
        pointers, ids = buffer_lengths(cell, stack)
        wanted = [f"tensor<{pointers}xi32>", *[f"tensor<{ids}xi32>"] * 2, f"tensor<{ids}xf32>"]
        _equal(f"buffers of {call.target}", call.kinds()[:4], wanted)


def limits_of_ids(cell: Cell, programs: Programs) -> None:
    """The limits of the tables' configs are those of the custom calls."""
    by_width = {stack.shape[1]: stack for stack in stacks(cell)}
    for _, call in [*_calls(programs, LOOKUP), *_calls(programs, UPDATE)]:
        stack = by_width[call.width()]
        names = ("_xla_max_ids_per_partition", "_xla_max_unique_ids_per_partition")
        wanted = [str(stack.max_ids), str(stack.max_unique_ids)]
        _equal(f"limits of {call.target}", [call.attribute(name) for name in names], wanted)


def rule_of_updates(cell: Cell, programs: Programs) -> None:
    """Updates compute the optimizer's rule with the config's constants and learning rate."""
    for program, call in _calls(programs, UPDATE):
        name = call.called()
        _equal("the rule", re.sub(r"_optimizer_builder.*", "", name), _BUILDERS[cell.optimizer])
        found = _constants(program.functions[name])
        _demand_constants(CONSTANTS[cell.optimizer], found, name)
        _demand_constants([LEARNING_RATE], _constants_reached(program, call.arguments()[7]), "the learning rate")


def gradients_from_the_loss(cell: Cell, programs: Programs) -> None:
    """What updates take as gradients depends on the targets of the loss and on the lookup."""
    if not cell.training:
        return
    targets = {_kind((model_of(cell).batch, model_of(cell).units))}
    if cell.pipelining:
        for kind in {_kind((stack.samples, stack.shape[1])) for stack in stacks(cell)}:
            depends = any(_depends(program, targets, {kind}) for program in programs)
            _demand(depends, f"no gradient {kind} depends on the targets")
        return
    for program, call in _calls(programs, UPDATE):
        reached = program.reached(call.arguments()[6])
        _demand(_has(program, reached, targets), "gradients that do not depend on the targets")
        _demand(any(lookup.result in reached for lookup in program.calls(LOOKUP)), "gradients without a lookup")


def tables_in_place(cell: Cell, programs: Programs) -> None:
    """Table and slots that an update takes are variables, and its results are written into them, in order."""
    for program, call in _calls(programs, UPDATE):
        given = program.operations[call.arguments()[5]].operands
        _equal(
            "where updates go",
            [_written_from(program, name) for name in given],
            [(call.result, i) for i in range(len(given))],
        )


def no_update_in_evaluation(cell: Cell, programs: Programs) -> None:
    """An evaluation writes no table."""
    if cell.training:
        return
    kinds = {_kind(shape) for shape in _table_shapes(cell)}
    written = [argument.kind for program in programs for argument in program.arguments if argument.updates is not None]
    _demand(not kinds & set(written), f"an evaluation writes {written}")


# ---- replicated tables


def updates_of_copies(cell: Cell, programs: Programs) -> None:
    """A training step writes every table and slot, with what depends on the targets; an evaluation none."""
    [program] = programs
    wanted = sorted(_kind(shape) for shape in _table_shapes(cell) for _ in range(1 + SLOTS[cell.optimizer]))
    updated, kinds = program.updated(), {argument.name: argument.kind for argument in program.arguments}
    tables = {name: result for name, result in updated.items() if kinds[name] in wanted}
    _equal("tables and slots written", sorted(kinds[name] for name in tables), wanted if cell.training else [])
    target = {_kind((model_of(cell).batch, model_of(cell).units))}
    for name, result in tables.items():
        _demand(_has(program, program.reached(result), target), f"{kinds[name]} does not depend on the targets")


def gradients_of_all_replicas(cell: Cell, programs: Programs) -> None:
    """Every write sums over all replicas: copies stay equal."""
    if cell.replicas == 1 or not cell.training:
        return
    [program] = programs
    groups = f"dense<[[{', '.join(map(str, range(cell.replicas)))}]]>"
    sums = {operation.result for operation in program.uses("cross-replica-sum") if groups in operation.text}
    kinds = {_kind(shape) for shape in _table_shapes(cell)}
    for argument in program.arguments:
        if argument.kind in kinds and argument.updates is not None:
            reached = program.reached(program.results[argument.updates])
            _demand(bool(sums & reached), f"{argument.kind} is written from one replica's gradients")


def rule_of_copies(cell: Cell, programs: Programs) -> None:
    """The step holds the optimizer's constants and learning rate."""
    [program] = programs
    if cell.training:
        rate = 1 / LEARNING_RATE if cell.optimizer == "FTRL" else LEARNING_RATE  # its rule divides by the rate
        _demand_constants([rate, *CONSTANTS[cell.optimizer]], _constants(program.functions["main"]), cell.optimizer)


# ---- all


def dense_weights_trained(cell: Cell, programs: Programs) -> None:
    """The dense layer's weights are written in a training step, with the gradients of all replicas."""
    model = model_of(cell)
    kernel = _kind((sum(table.dim for table in model.tables), model.units))
    writes = [(program, _written(program, kernel)) for program in programs if _written(program, kernel)]
    _demand(bool(writes) == cell.training, f"programs that write the dense weights: {len(writes)}")
    for program, result in writes:
        sums = {operation.result for operation in program.uses("cross-replica-sum")}
        _demand(
            cell.replicas == 1 or bool(sums & program.reached(result)),
            "dense gradients are not summed over the replicas",
        )


Check = Callable[[Cell, Programs], None]
_BOTH: Final[tuple[Check, ...]] = (dense_weights_trained,)
CHECKS: Final[Mapping[str, tuple[Check, ...]]] = {
    "sparsecore": (
        number_of_lookups,
        number_of_updates,
        shapes_of_tables,
        lengths_of_buffers,
        limits_of_ids,
        rule_of_updates,
        gradients_from_the_loss,
        tables_in_place,
        no_update_in_evaluation,
        *_BOTH,
    ),
    "replicated": (updates_of_copies, gradients_of_all_replicas, rule_of_copies, *_BOTH),
}
"""Path -> its checks."""


def failures(cell: Cell, texts: Sequence[str], bridged: str) -> dict[str, str]:
    """Check -> what it found, of those that fail.

    Args:
        cell: what was asked for.
        texts: of the lowered programs.
        bridged: the module that they were taken from.
    """
    programs = [Program(text) for text in texts]
    found = {check.__name__: _failure(check, cell, programs) for check in CHECKS[cell.path]}
    if cell.path == "sparsecore" and not cell.pipelining:
        found[check_buffers_of_hosts.__name__] = check_buffers_of_hosts(bridged, programs, (LOOKUP, UPDATE))
        tables = len(model_of(cell).tables) if cell.tracked else 0
        found[check_stamps_of_host.__name__] = check_stamps_of_host(bridged, tables)
    return {check: text for check, text in found.items() if text}


def _failure(check: Check, cell: Cell, programs: Programs) -> str:
    try:
        check(cell, programs)
    except CheckError as error:
        return str(error)
    except (IndexError, KeyError, ValueError) as error:
        return f"not as expected at all: {type(error).__name__}: {error}"
    return ""


# ---- texts


def _kind(shape: Sequence[int]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def _table_shapes(cell: Cell) -> list[tuple[int, int]]:
    if cell.path == "sparsecore":
        return [stack.shape for stack in stacks(cell)]
    return [(table.rows, table.dim) for table in model_of(cell).tables]


def _arguments(program: Program, kinds: set[str]) -> list[Argument]:
    return [argument for argument in program.arguments if argument.kind in kinds]


def _has(program: Program, reached: frozenset[str], kinds: set[str]) -> bool:
    return any(argument.name in reached for argument in _arguments(program, kinds))


def _depends(program: Program, on: set[str], results: set[str]) -> bool:
    """Whether a result of one of the kinds `results` depends on an argument of the kinds `on`."""
    ends = program.functions["main"].rstrip().splitlines()[-2].split(" : ")[-1]
    kinds = re.findall(r"tensor<[^>]*>", ends)
    pairs = zip(program.results, kinds, strict=True)
    return any(kind in results and _has(program, program.reached(name), on) for name, kind in pairs)


def _written(program: Program, kind: str) -> str:
    """The result that is written into the argument of that kind; "" where it stays."""
    found = [program.updated()[a.name] for a in _arguments(program, {kind}) if a.updates is not None]
    return "" if not found or found[0].startswith("%arg") else found[0]


def _written_from(program: Program, argument: str) -> tuple[str, int] | None:
    """(call, its result) that is written into an argument."""
    result = program.updated().get(argument, "")
    operation = program.operations.get(result)
    if operation is None:
        return None
    if operation.target:
        return result, 0
    found = re.search(r"get_tuple_element (%\w+)\[(\d+)\]", operation.text)
    return (found.group(1), int(found.group(2))) if found else None


def _constants(text: str) -> list[float]:
    """Absolute values of the numbers in a text."""
    return [abs(float(number)) for number in re.findall(r"constant dense<([-+.\deE]+)> : tensor<[\dx]*f32>", text)]


def _constants_reached(program: Program, name: str) -> list[float]:
    operations = (program.operations.get(one) for one in program.reached(name))
    return _constants("\n".join(operation.text for operation in operations if operation))


def _demand_constants(wanted: Sequence[float], found: Sequence[float], where: str) -> None:
    missing = [
        one for one in wanted if not any(abs(one - other) <= 1e-6 * max(1e-3, abs(one)) + 2e-7 for other in found)
    ]
    _demand(not missing, f"{where} lacks {missing}, it has {sorted(set(found))}")
