"""Which saved weight belongs to which weight of a factory's model: proven by names, or by a one-to-one correspondence.

The rules, as docs/export.md ("Whose weights a model gets") has them:

1. The model is laid over a saved object: attributes over attributes of the same name, lists over lists. Shapes must be equal.
2. A name that somebody chose must be equal on both sides, wherever both sides have it. In lists, it finds the member.
3. A name that Keras makes up (`dense_7`) says how many layers of a class the process had made before. Members of a list without
   a chosen name are paired by their places: as many on both sides, made in the same order by these numbers.
4. Where such members have one form, the named layers must stand in the same order too. Without different numbers they are refused.
5. Where no saved object corresponds, weights are found by their whole names, if all layers of the model have chosen, unique ones.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from tpuembed.checkpoint.saved_objects import Objects, SavedObject, Weight

__all__ = ["Candidate", "Mismatch", "Names", "OwnNames", "find_candidates", "match_by_name"]

Value = TypeVar("Value")
_NUMBER: Final = re.compile(r"(?P<stem>.+?)(?:_(?P<number>\d+))?")


class Mismatch(Exception):  # noqa: N818 - what does not correspond; the caller tries elsewhere
    """Two objects do not correspond, and why."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A saved object that corresponds to the factory's model.

    Attributes:
        path: of the saved object.
        pairs: key of a weight of the model -> the saved weight.
        layers: number of an object of the model -> number of the saved one.
        left_over: the saved weights below that object, or beside it in the same saved model, that nothing takes.
    """

    path: str
    pairs: Mapping[str, Weight]
    layers: Mapping[int, int]
    left_over: tuple[Weight, ...]


class OwnNames(NamedTuple):
    """What the factory's model is called.

    Attributes:
        name: of the model.
        classes: the names that Keras makes up for its class and those that it is derived from.
    """

    name: str
    classes: frozenset[str]


class Names:
    """Which names of layers somebody chose."""

    def __init__(self, stems: Collection[str]) -> None:
        """Take the names that Keras makes up for the classes of layers there are, without their numbers.

        A Bidirectional layer makes two names of its layer's.
        """
        self._stems = {*stems, *(f"{way}_{stem}" for way in ("forward", "backward") for stem in stems)}

    def without_derived(self, objects: Objects) -> Objects:
        """The same objects, where a name that holds a made-up name of a layer around it is itself one that Keras may have made up.

        `tw_1_h` below `tw_1` becomes `tw_h_1`, whose stem counts as made up from then on.
        """
        around: dict[int, tuple[str, ...]] = {0: ()}
        nodes = list(objects.nodes)
        for number in objects.below(0):
            node = nodes[number]
            known = around[number]
            name = node.name and self._derived(node.name, known)
            weights = {}
            for key, weight in node.weights.items():
                *scopes, leaf = weight.name.split("/")
                derived = [self._derived(scope, scopes[:place]) for place, scope in enumerate(scopes)]
                weights[key] = dataclasses.replace(weight, name="/".join([*derived, leaf]))
            nodes[number] = dataclasses.replace(node, name=name, weights=weights)
            for child in node.children.values():
                around.setdefault(child, (*known, node.name) if node.name else known)
        return dataclasses.replace(objects, nodes=tuple(nodes))

    def _derived(self, name: str, around: Iterable[str]) -> str:
        for outer in around:
            found = self.number(outer)
            if found is not None and self.number(name) is None and re.search(rf"{re.escape(outer)}(?!\d)", name):
                stem = re.sub(rf"{re.escape(outer)}(?!\d)", found[0], name)
                self._stems.add(stem)
                return f"{stem}_{found[1]}"
        return name

    def number(self, name: str) -> tuple[str, int] | None:
        """(stem, number) of a name that Keras may have made up; None of a chosen one."""
        match = _NUMBER.fullmatch(name)
        if match is None:
            return None
        if match["stem"] in self._stems:
            return match["stem"], int(match["number"] or 0)
        return (name, 0) if name in self._stems else None

    def without_numbers(self, name: str) -> str:
        """A weight's name with the stems of scopes that Keras may have made up."""
        *scopes, leaf = name.split("/")
        made_up = [self.number(scope) for scope in scopes]
        return "/".join(
            [scope if found is None else found[0] for scope, found in zip(scopes, made_up, strict=True)] + [leaf]
        )

    def chosen(self, name: str) -> frozenset[str]:
        """The scopes in a weight's name that somebody chose."""
        return frozenset(scope for scope in name.split("/")[:-1] if self.number(scope) is None)

    def may_be_one(self, wanted: str, saved: str) -> bool:
        """Returns True if two names of weights do not contradict each other.

        TensorFlow numbers a scope that a graph enters twice, and drops the inner scopes of weights that are made late.
        """
        if not wanted or not saved:
            return True
        *wanted_scopes, wanted_leaf = wanted.split("/")
        *saved_scopes, saved_leaf = saved.split("/")
        if not self.same(wanted_leaf, saved_leaf):
            return False
        if len(saved_scopes) == 1 < len(wanted_scopes) and re.fullmatch(
            re.escape(wanted_scopes[0]) + r"_\d+", saved_scopes[0]
        ):
            return True
        return self.counterparts(wanted, saved) is not None

    def counterparts(self, wanted: str, saved: str) -> list[tuple[str, str]] | None:
        """(scope, scope) of those in two names of weights that can be the same; None where one has no counterpart."""
        pairs: list[tuple[str, str]] = []
        first, second = wanted.split("/")[:-1], saved.split("/")[:-1]
        rest = iter(first if len(second) < len(first) else second)
        for scope in second if len(second) < len(first) else first:
            other = next((other for other in rest if self.same(scope, other)), None)
            if other is None:
                return None
            pairs.append((other, scope) if len(second) < len(first) else (scope, other))
        return pairs

    def same(self, wanted: str, saved: str) -> bool:
        """Returns True if two names are equal, or made up for layers of one class."""
        first, second = self.number(wanted), self.number(saved)
        return wanted == saved or (first is not None and second is not None and first[0] == second[0])


class _Walk:
    """One attempt to lay a model over a saved object."""

    def __init__(self, names: Names, model: Objects, saved: Objects, is_entry: bool, scopes: tuple[str, str]) -> None:
        """Ignore the name of the model itself if it is an entry: users name models freely. `scopes` is see `_own_scopes`."""
        self._names, self._model, self._saved = names, model, saved
        self._is_root, self._scopes = is_entry, scopes
        self.layers: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self.pairs: dict[str, Weight] = {}
        self._takers: dict[str, str] = {}
        self._numbers: dict[str, dict[int, int]] = {}
        self._alike = ""
        self._have_moved = False

    def align(self, wanted: int, found: int) -> None:
        """Pair what lies below `wanted`, in the model, with what lies below `found`.

        Raises:
            Mismatch: it does not correspond.
        """
        is_root, self._is_root = self._is_root, False
        before, owner = self.layers.get(wanted), self._taken.get(found)
        if before is not None or owner is not None:
            if before != found or owner != wanted:
                raise Mismatch(f"{self._path(wanted)} is shared in another way than {self._saved.nodes[found].path}")
            return
        self.layers[wanted], self._taken[found] = found, wanted
        mine, theirs = self._model.nodes[wanted], self._saved.nodes[found]
        if not is_root and not (mine.name is None or theirs.name is None or self._names.same(mine.name, theirs.name)):
            raise Mismatch(f"{theirs.path} is called {theirs.name!r} there and {mine.name!r} in the model")
        self._check_tables(wanted, found)
        for attribute, weight in mine.weights.items():
            self._pair(weight, _get(theirs.weights, attribute), mine, theirs)
        if mine.is_list and theirs.is_list:
            for child, other in self._pairs_in_lists(mine, theirs).items():
                self.align(child, other)
            return
        for attribute, child in mine.children.items():
            if not self._model.weights(child):
                continue
            counterpart = _get(theirs.children, attribute)
            if counterpart is None:
                raise Mismatch(f"{theirs.path or 'the root'} has no {attribute!r}")
            self.align(child, counterpart)

    def check_order(self) -> None:
        """Raise Mismatch for layers of one form told apart by their places, where named ones have changed theirs.

        What stands before one of two heads stands before the other where the heads are returned in another order.
        """
        if self._alike and self._have_moved:
            raise Mismatch(f"{self._alike}, and the model has named layers in another order")

    def _check_tables(self, wanted: int, found: int) -> None:
        mine, theirs = self._model.tables(wanted), self._saved.tables(found)
        if mine and theirs and not mine <= theirs:
            raise Mismatch(
                f"{self._saved.nodes[found].path or 'the root'} has the tables {', '.join(sorted(theirs))}, "
                f"the model {', '.join(sorted(mine))}"
            )

    def _pair(self, weight: Weight, saved: Weight | None, mine: SavedObject, theirs: SavedObject) -> None:
        if saved is None:
            raise Mismatch(f"{theirs.path or 'the root'} has no value for {weight.name or mine.path}")
        if saved.shape != weight.shape:
            raise Mismatch(
                f"{saved.name or saved.key} ({saved.key}) has shape {saved.shape}, the model's {weight.name} {weight.shape}"
            )
        first, slash, rest = saved.name.partition("/")
        name = f"{self._scopes[0]}/{rest}" if slash and first == self._scopes[1] else saved.name
        if not self._names.may_be_one(weight.name, name):
            raise Mismatch(f"{saved.key} is called {saved.name!r} there and {weight.name!r} in the model")
        if self.pairs.setdefault(weight.key, saved).key != saved.key:
            raise Mismatch(f"{weight.name} has two counterparts, {saved.key} and {self.pairs[weight.key].key}")
        if self._takers.setdefault(saved.key, weight.key) != weight.key:
            raise Mismatch(f"two weights of the model correspond to {saved.key}")
        self._check_numbers(weight.name, name)

    def _check_numbers(self, mine: str, theirs: str) -> None:
        """Numbers that Keras gave say in which order layers were made: it must be the same on both sides."""
        for scope, other in self._names.counterparts(mine, theirs) or ():
            first, second = self._names.number(scope), self._names.number(other)
            if first is None or second is None:
                continue
            known = self._numbers.setdefault(first[0], {})
            known[first[1]] = second[1]
            inside = [known[number] for number in sorted(known)]
            if any(later <= earlier for earlier, later in itertools.pairwise(inside)):
                raise Mismatch(f"{theirs!r} was made before or after other layers than {mine!r} in the model")

    def _difference(self, mine: Sequence[int], theirs: Sequence[int]) -> str:
        """Say which layers, by the shapes of their weights, one side has more of."""
        here, there = (
            Counter(
                ", ".join(str(list(one.shape)) for one in each.nodes[number].weights.values()) for number in numbers
            )
            for each, numbers in ((self._model, mine), (self._saved, theirs))
        )
        sides = {"Only there": there - here, "Only in the model": here - there}
        return ". ".join(f"{side}: weights {' and '.join(more.elements())}" for side, more in sides.items() if more)

    def _pairs_in_lists(self, model: SavedObject, where: SavedObject) -> dict[int, int]:
        """The members of two lists that correspond: those of one chosen name, and of the rest those in one place.

        Raises:
            Mismatch: the rest does not correspond one to one, or only its places tell its members apart.
        """
        wanted, found = model.ordered(), where.ordered()
        mine, theirs = self._labels(self._model, wanted), self._labels(self._saved, found)
        named: dict[int, int] = {}
        for child, label in sorted(mine.items(), key=lambda one: not self._model.weights(one[0])):
            alike = [other for other, names in theirs.items() if names & label]
            if len(alike) > 1 or (alike and alike[0] in named.values()):
                if not self._model.weights(child):
                    continue
                raise Mismatch(f"{self._path(child)} shares names with several of {where.path}")
            if alike:
                named[child] = alike[0]
        places = sorted((wanted.index(child), found.index(other)) for child, other in named.items())
        if any(after[1] < before[1] for before, after in itertools.pairwise(places)) or (
            len(wanted) == len(found) and any(here != there for here, there in places)
        ):
            self._have_moved = True
        rest = [child for child in wanted if child not in named and self._model.weights(child)]
        others = [child for child in found if child not in named.values() and self._saved.weights(child)]
        if len(rest) != len(others):
            others = [child for child in others if not theirs[child] or any(self._may_be(mine, child) for mine in rest)]
        if len(rest) != len(others):
            raise Mismatch(
                f"{where.path} has {len(others)} layers without a name of their own, or with one that the model lacks, and the "
                f"model has {len(rest)} such layers. {self._difference(rest, others)}"
            )
        pairs = dict(zip(rest, others, strict=True))
        self._check_alike(pairs, where)
        return {child: other for child, other in named.items() if self._model.weights(child)} | pairs

    def _may_be(self, wanted: int, found: int) -> bool:
        """Returns True if each weight below an object of the model has a possible counterpart below a saved object."""
        saved = self._saved.weights(found).values()
        return all(
            any(mine.shape == other.shape and self._names.may_be_one(mine.name, other.name) for other in saved)
            for mine in self._model.weights(wanted).values()
        )

    def _check_alike(self, pairs: Mapping[int, int], where: SavedObject) -> None:
        """Note layers of one form without names of their own. Raise Mismatch unless Keras' numbers say which is which.

        A name that no saved weight has does not count: a checkpoint that has lost it cannot confirm it.
        """
        confirmed = {name for other in pairs.values() for name in self._chosen(self._saved, other)}
        forms: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
        for child in pairs:
            own = []
            for weight in self._model.weights(child).values():
                *scopes, leaf = weight.name.split("/")
                known = [scope for scope in scopes if self._names.number(scope) is not None or scope in confirmed]
                own.append((self._names.without_numbers("/".join([*known, leaf])), weight.shape))
            forms.setdefault(tuple(sorted(own)), []).append(child)
        for form, alike in forms.items():
            if len(alike) == 1:
                continue
            self._alike = f"{where.path} holds layers of one form without names of their own ({form[0][0]})"
            mine = {self._numbers_in(self._model, child) for child in alike}
            theirs = {self._numbers_in(self._saved, pairs[child]) for child in alike}
            if self._saved.is_named and min(len(mine), len(theirs)) < len(alike):
                raise Mismatch(
                    f"{where.path} holds layers of one form whose names repeat ({form[0][0]}): give them different names, or save "
                    "with model.save_weights('model.weights.h5')"
                )

    def _numbers_in(self, objects: Objects, number: int) -> frozenset[tuple[str, int]]:
        scopes = {scope for weight in objects.weights(number).values() for scope in weight.name.split("/")[:-1]}
        return frozenset(found for scope in scopes if (found := self._names.number(scope)) is not None)

    def _labels(self, objects: Objects, children: Sequence[int]) -> dict[int, frozenset[str]]:
        """Child -> the names that somebody chose for it or something below it, and that no other child has."""
        found = {child: frozenset(self._chosen(objects, child)) for child in children}
        count = Counter(name for names in found.values() for name in names)
        return {child: frozenset(name for name in names if count[name] == 1) for child, names in found.items()}

    def _chosen(self, objects: Objects, number: int) -> Iterator[str]:
        for below in objects.below(number):
            node = objects.nodes[below]
            if node.name is not None and self._names.number(node.name) is None:
                yield node.name
            for weight in node.weights.values():
                yield from self._names.chosen(weight.name)

    def _path(self, wanted: int) -> str:
        return self._model.nodes[wanted].path or "the model"


def find_candidates(
    names: Names, own: OwnNames, model: Objects, saved: Objects
) -> tuple[list[Candidate], list[Mismatch]]:
    """The saved objects that correspond to the factory's model, and why others do not.

    Those that give every weight the same value count once. One without the model's tables does not count where a saved model
    has them: it may be an average of that model, or a part of it.
    """
    model, saved = names.without_derived(model), names.without_derived(saved)
    core = _core(model, 0)
    has_tables = any(_is_model_of(saved, number, model.tables(core)) for number in saved.below(0))
    entries = _entries(saved)
    found: list[tuple[bool, Candidate]] = []
    failures: list[tuple[tuple[int, int], Mismatch]] = []
    for number in saved.below(0):
        if number not in entries and not (model.tables(core) and model.tables(core) <= saved.tables(number)):
            continue
        if saved.nodes[number].is_list != model.nodes[core].is_list or not saved.weights(number):
            continue
        is_entry = number in entries
        walk = _Walk(
            names, model, saved, is_entry, _own_scopes(own, model, core, saved, number) if is_entry else ("", "")
        )
        try:
            if has_tables and not saved.tables(number):
                raise Mismatch(
                    f"{saved.nodes[number].path or 'the root'} does not hold the model's tables, and another does"
                )
            walk.align(core, number)
            walk.check_order()
        except Mismatch as error:
            failures.append(((len(walk.layers), number), error))
            continue
        used = {weight.key for weight in walk.pairs.values()}
        left = _left_over(saved, saved.below(number), used)
        if left and not saved.is_named:
            failures.append(
                ((len(walk.layers), number), Mismatch(f"layers have no names, and {len(left)} weights are left over"))
            )
            continue
        around = _left_over(saved, _model_around(saved, number), used)
        found.append((not left, Candidate(saved.nodes[number].path, walk.pairs, walk.layers, around)))
    different: list[Candidate] = []
    for _, candidate in sorted(found, key=lambda one: not one[0]):  # those that leave nothing over first
        if all(candidate.pairs != other.pairs for other in different):
            different.append(candidate)
    return different, [error for _, error in sorted(failures, key=lambda failure: failure[0], reverse=True)]


def _own_scopes(own: "OwnNames", model: Objects, core: int, saved: Objects, number: int) -> tuple[str, str]:
    """Return the names of the model and of a saved one, where all their weights begin with them; otherwise nothing.

    Users name models freely, and may give a class another name. A scope around several layers is not the name of one of them, and
    neither is the name of a class that the model's own is derived from.
    """
    mine = {weight.name.partition("/")[0] for weight in model.weights(core).values()}
    theirs = {weight.name.partition("/")[0] for weight in saved.weights(number).values()}
    if mine != {own.name} or len(theirs) != 1 or any(node.name == own.name for node in model.nodes):
        return "", ""
    layers = [child for child in saved.nodes[number].children.values() if saved.weights(child)]
    match = _NUMBER.fullmatch(scope := theirs.pop())
    return (own.name, scope) if len(layers) > 1 or (match and match["stem"] in own.classes) else ("", "")


def _is_model_of(saved: Objects, number: int, tables: frozenset[str]) -> bool:
    """Returns True if an object is a model with `tables` and other weights, and does not only hold models."""
    is_model = number > 0 or saved.root_is_model
    return is_model and bool(tables) and tables <= saved.tables(number) and bool(saved.weights(number))


def _core(objects: Objects, number: int) -> int:
    """The innermost object that still holds all that `number` does."""
    while not objects.nodes[number].weights:
        held = [child for child in objects.nodes[number].children.values() if objects.weights(child)]
        if len(held) != 1 or objects.tables(held[0]) != objects.tables(number):
            break
        number = held[0]
    return number


def _entries(saved: Objects) -> frozenset[int]:
    """The objects that a user means by a saved model: the root, where that only holds models these, and what is alone in one."""
    found: set[int] = set()
    for outer in (0, *(() if saved.root_is_model else saved.nodes[0].children.values())):
        number: int | None = outer
        while number is not None and number not in found:
            found.add(number)
            held = [child for child in saved.nodes[number].children.values() if saved.weights(child)]
            number = held[0] if len(held) == 1 and not saved.nodes[number].weights else None
    return frozenset(found)


def _model_around(saved: Objects, number: int) -> list[int]:
    """The objects of the saved model that `number` is in: the root, or what hangs there and leads to it."""
    tops = [child for child in saved.nodes[0].children.values() if number in saved.below(child)]
    if saved.root_is_model or number == 0:
        return saved.below(0)
    return [below for top in ([number] if number in tops else tops) for below in saved.below(top)]


def _left_over(saved: Objects, numbers: Iterable[int], used: Collection[str]) -> tuple[Weight, ...]:
    left = {weight.key: weight for number in numbers for weight in saved.nodes[number].weights.values()}
    return tuple(weight for key, weight in left.items() if key not in used and not weight.is_count)


def match_by_name(names: Names, model: Objects, saved: Objects) -> Candidate:
    """The saved weights of the same names as the model's, wherever they are.

    Raises:
        Mismatch: a name is missing, repeats, or was not chosen.
    """
    if not saved.is_named:
        raise Mismatch("the file has lost the names of layers")
    model, saved = names.without_derived(model), names.without_derived(saved)
    mine, theirs = (Counter(weight.name for weight in objects.weights().values()) for objects in (model, saved))
    places = {
        weight.name: (number, weight) for number in saved.below(0) for weight in saved.nodes[number].weights.values()
    }
    pairs: dict[str, Weight] = {}
    layers: dict[int, int] = {}
    for number in model.below(0):
        for weight in model.nodes[number].weights.values():
            name = weight.name
            made_up = [scope for scope in name.split("/")[:-1] if names.number(scope) is not None]
            if made_up or "/" not in name:
                raise Mismatch(f"Keras made the names of {name}, and it numbers layers anew in every process")
            if mine[name] != 1 or theirs[name] != 1:
                raise Mismatch(f"{theirs[name]} saved weights and {mine[name]} of the model are called {name}")
            other, found = places[name]
            if found.shape != weight.shape:
                raise Mismatch(f"{name} has shape {found.shape}, the model's {weight.shape}")
            if layers.setdefault(number, other) != other:
                raise Mismatch(f"the weights of one layer of the model are in two saved ones ({name})")
            pairs[weight.key] = found
    numbers = {below for number in layers.values() for below in _model_around(saved, number)}
    used = {weight.key for weight in pairs.values()}
    return Candidate("", pairs, layers, _left_over(saved, sorted(numbers), used))


def _get(mapping: Mapping[str, Value], attribute: str) -> Value | None:
    """Return what an attribute holds. Keras 2 tracked a Dense layer's matrix as `kernel`, Keras 3 tracks it as `_kernel`."""
    return mapping.get(attribute, mapping.get(attribute.lstrip("_")))
