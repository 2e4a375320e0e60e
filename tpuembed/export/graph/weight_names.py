"""Which saved weight belongs to which weight of a factory's model: proven by names, or by a one-to-one correspondence.

A layer's name is evidence where somebody chose it. A name that Keras makes up (`dense_7`) says how many layers of a class the
process had made before, so that the same layer has another one in the next process. Such layers, and layers whose names repeat,
are told apart by their places only where all of them have a counterpart: nothing is left over on either side, in the order in
which Keras numbered them, and with the same shapes. Attributes (`self.query`) are names too.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from tpuembed.checkpoint.saved_objects import Objects, SavedObject, Weight
from tpuembed.errors import first_few

__all__ = ["Candidate", "Mismatch", "Names", "find_candidates", "match_by_name"]

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

    def __init__(self, names: Names, model: Objects, saved: Objects, is_entry: bool = False) -> None:
        """Ignore the name of the model itself if it is an entry: users name models freely."""
        self._names, self._model, self._saved = names, model, saved
        self._is_root = is_entry
        self.layers: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self.pairs: dict[str, Weight] = {}
        self._takers: dict[str, str] = {}
        self._numbers: dict[str, dict[int, int]] = {}
        self._scope: tuple[int, ...] = ()
        self._alike: dict[tuple[int, ...], str] = {}
        self._moved: set[tuple[int, ...]] = set()

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
        mine, theirs = self._model.nodes[wanted], self._saved.nodes[found]
        if not is_root and not (mine.name is None or theirs.name is None or self._names.same(mine.name, theirs.name)):
            raise Mismatch(f"{theirs.path} is called {theirs.name!r} there and {mine.name!r} in the model")
        self._check_tables(wanted, found)
        self.align_one(wanted, found)
        if mine.is_list and theirs.is_list:
            self._align_lists(mine, theirs, self._children(self._model, wanted), self._children(self._saved, found))
            return
        for attribute, child in mine.children.items():
            if not self._model.weights(child):
                continue
            counterpart = _get(theirs.children, attribute)
            if counterpart is None:
                raise Mismatch(f"{theirs.path or 'the root'} has no {attribute!r}")
            self.align(child, counterpart)

    def align_one(self, wanted: int, found: int) -> None:
        """Pair the weights of two layers, and not what is below them.

        Raises:
            Mismatch: they do not correspond.
        """
        self.layers[wanted], self._taken[found] = found, wanted
        mine, theirs = self._model.nodes[wanted], self._saved.nodes[found]
        for attribute, weight in mine.weights.items():
            self._pair(weight, _get(theirs.weights, attribute), mine, theirs)

    def _children(self, objects: Objects, number: int) -> list[int]:
        """The elements of a list that hold weights, in order."""
        return [child for child in objects.nodes[number].ordered() if objects.weights(child)]

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
        if not self._names.may_be_one(weight.name, saved.name):
            raise Mismatch(f"{saved.key} is called {saved.name!r} there and {weight.name!r} in the model")
        if self.pairs.setdefault(weight.key, saved).key != saved.key:
            raise Mismatch(f"{weight.name} has two counterparts, {saved.key} and {self.pairs[weight.key].key}")
        if self._takers.setdefault(saved.key, weight.key) != weight.key:
            raise Mismatch(f"two weights of the model correspond to {saved.key}")
        self._check_order(weight.name, saved.name)

    def _check_order(self, mine: str, theirs: str) -> None:
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

    def _align_lists(self, model: SavedObject, where: SavedObject, wanted: Sequence[int], found: Sequence[int]) -> None:
        mine, theirs = self._labels(self._model, wanted), self._labels(self._saved, found)
        pairs: dict[int, int] = {}
        for child, label in mine.items():
            alike = [other for other, names in theirs.items() if names & label]
            if len(alike) > 1 or (alike and alike[0] in pairs.values()):
                raise Mismatch(f"{self._path(child)} shares names with several of {where.path}")
            if alike:
                pairs[child] = alike[0]
        rest = [child for child in wanted if child not in pairs]
        others = [child for child in found if child not in pairs.values()]
        if len(rest) != len(others):
            others = [child for child in others if not theirs[child] or any(self._may_be(mine, child) for mine in rest)]
        if len(rest) != len(others):
            raise Mismatch(
                f"{where.path} has {len(others)} layers without a name of their own, or with one that the model lacks, and the "
                f"model has {len(rest)} such layers"
            )
        confirmed = {name for other in others for name in self._chosen(self._saved, other)}
        forms = Counter(self._form(child, confirmed) for child in rest)
        if max(forms.values(), default=0) > 1:
            form = forms.most_common(1)[0][0]
            self._alike.setdefault(
                self._scope, f"{where.path} holds layers of one form without names of their own ({form[0][0]})"
            )
        others_named = self._named_without_weights(model, where)
        if self._have_moved(model.ordered(), where.ordered(), pairs) or not _is_sorted(others_named):
            self._moved.add(self._scope)
        named = frozenset(pairs)
        pairs.update(zip(rest, others, strict=True))
        self._check_made_in_order(rest, where, confirmed)
        scope = self._scope
        for child in wanted:
            self._scope = (*scope, child) if child in named else scope
            self.align(child, pairs[child])
        self._scope = scope

    def _named_without_weights(self, model: SavedObject, where: SavedObject) -> list[tuple[int, int]]:
        """The places in two lists of layers without weights that have one chosen name; weight files have their names too."""
        mine, theirs = (
            {
                name: place
                for place, child in enumerate(listed.ordered())
                if (name := objects.nodes[child].name)
                and self._names.number(name) is None
                and not objects.weights(child)
            }
            for objects, listed in ((self._model, model), (self._saved, where))
        )
        return sorted((place, theirs[name]) for name, place in mine.items() if name in theirs)

    def _may_be(self, wanted: int, found: int) -> bool:
        """Returns True if each weight below an object of the model has a possible counterpart below a saved object."""
        saved = self._saved.weights(found).values()
        return all(
            any(mine.shape == other.shape and self._names.may_be_one(mine.name, other.name) for other in saved)
            for mine in self._model.weights(wanted).values()
        )

    def _have_moved(self, wanted: Sequence[int], found: Sequence[int], named: Mapping[int, int]) -> bool:
        """Returns True if named layers have other places in two lists, or another order if one list is longer."""
        places = sorted((wanted.index(child), found.index(other)) for child, other in named.items())
        if len(wanted) == len(found) and any(mine != theirs for mine, theirs in places):
            return True
        return not _is_sorted(places)

    def check_same_order(self) -> None:
        """Raise Mismatch for layers of one form told apart by their places, where named ones have changed theirs.

        What stands before one of two heads stands before the other where the heads are returned in another order. Layers below
        a named one go where it goes: its own place says nothing about theirs.
        """
        for scope, alike in self._alike.items():
            if any(moved[: len(scope)] == scope for moved in self._moved):
                raise Mismatch(f"{alike}, and the model has the named ones beside them in another order")

    def _form(self, child: int, confirmed: Collection[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The names and shapes of the weights below an object of the model.

        Without Keras' numbers, and without names that no saved weight has: a checkpoint that has lost them cannot confirm them.
        """
        found = []
        for weight in self._model.weights(child).values():
            *scopes, leaf = weight.name.split("/")
            known = [scope for scope in scopes if self._names.number(scope) is not None or scope in confirmed]
            found.append((self._names.without_numbers("/".join([*known, leaf])), weight.shape))
        return tuple(sorted(found))

    def _check_made_in_order(self, children: Sequence[int], where: SavedObject, confirmed: Collection[str]) -> None:
        """Raise Mismatch for layers told apart by their places alone, whose places are not those in which they were made.

        A list of outputs in another order than in training gives them other places; outputs in a dict are sorted by their keys.
        """
        before: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        for child in children:
            weights = self._model.weights(child).values()
            if any(self._names.number(scope) for weight in weights for scope in weight.name.split("/")[:-1]):
                continue  # Keras' numbers prove the order
            alike = self._form(child, confirmed)
            made = self._model.made.get(child, 0)
            if made < before.get(alike, 0):
                raise Mismatch(
                    f"{where.path} holds layers of one form whose names repeat ({alike[0][0]}), and the model has them in another "
                    "order than it makes them in (return a dict of outputs, or save with model.save_weights('model.weights.h5'))"
                )
            before[alike] = made

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


def _is_sorted(places: Sequence[tuple[int, int]]) -> bool:
    """Returns True if layers sorted by their places in one list are also sorted by those in the other."""
    return all(earlier[1] < later[1] for earlier, later in itertools.pairwise(places))


def find_candidates(names: Names, model: Objects, saved: Objects) -> tuple[list[Candidate], list[Mismatch]]:
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
        walk = _Walk(names, model, saved, is_entry=number in entries)
        try:
            if has_tables and not saved.tables(number):
                raise Mismatch(
                    f"{saved.nodes[number].path or 'the root'} does not hold the model's tables, and another does"
                )
            walk.align(core, number)
            walk.check_same_order()
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
    """The saved layers of the same names as the model's, wherever they are.

    Layers below a chosen scope that have no names of their own are told apart where all of that scope correspond.

    Raises:
        Mismatch: a name is missing, repeats, or was not chosen.
    """
    if not saved.is_named:
        raise Mismatch("the file has lost the names of layers")
    model, saved = names.without_derived(model), names.without_derived(saved)
    mine, theirs = _by_scope(names, model), _by_scope(names, saved)
    pairs: dict[str, Weight] = {}
    layers: dict[int, int] = {}
    for scope, owners in mine.items():
        found = theirs.get(scope, [])
        repeats = any(_scope(model.nodes[owner]) == scope for owner in owners) and len(owners) > 1
        if not scope or repeats or len(found) != len(owners):
            raise Mismatch(_why_not(model, scope, owners, found))
        if len(owners) > 1 and _inside(mine, scope) != _inside(theirs, scope):
            raise Mismatch(
                f"layers below {'/'.join(scope)} have no names of their own, and others there are in another order"
            )
        walk = _Walk(names, model, saved)
        for wanted, other in zip(owners, found, strict=True):
            walk.align_one(wanted, other)
        pairs.update(walk.pairs)
        layers.update(walk.layers)
    used = {weight.key for weight in pairs.values()}
    if len({weight.key for weight in pairs.values()}) < len(pairs):
        raise Mismatch("two weights of the model have one name")
    numbers = {below for number in layers.values() for below in _model_around(saved, number)}
    return Candidate("", pairs, layers, _left_over(saved, sorted(numbers), used))


def _by_scope(names: Names, objects: Objects) -> dict[tuple[str, ...], list[int]]:
    """Leading chosen scopes of a layer's weights -> the layers below, in order; () for those without any."""
    found: dict[tuple[str, ...], list[int]] = {}
    for number in objects.below(0):
        if objects.nodes[number].weights:
            chosen = itertools.takewhile(lambda scope: names.number(scope) is None, _scope(objects.nodes[number]))
            found.setdefault(tuple(chosen), []).append(number)
    return found


def _scope(layer: SavedObject) -> tuple[str, ...]:
    """The scopes of a layer's weights; () where they have none, or different ones."""
    scope, *others = {weight.name.rpartition("/")[0] for weight in layer.weights.values()}
    return tuple(scope.split("/")) if scope and not others else ()


def _inside(owners: Mapping[tuple[str, ...], Sequence[int]], scope: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The chosen scopes below `scope`, in order."""
    return [other for other in owners if len(other) > len(scope) and other[: len(scope)] == scope]


def _why_not(model: Objects, scope: tuple[str, ...], owners: Sequence[int], found: Sequence[int]) -> str:
    mine = first_few(sorted(weight.name for owner in owners for weight in model.nodes[owner].weights.values()))
    if not scope:
        return f"Keras made the names of {mine}, and it numbers layers anew in every process"
    return f"{len(found)} saved layers and {len(owners)} of the model are called {'/'.join(scope)} ({mine})"


def _get(mapping: Mapping[str, Value], attribute: str) -> Value | None:
    """Return what an attribute holds. Keras 2 tracked a Dense layer's matrix as `kernel`, Keras 3 tracks it as `_kernel`."""
    return mapping.get(attribute, mapping.get(attribute.lstrip("_")))
