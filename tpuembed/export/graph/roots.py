"""Which objects of a checkpoint the factory's model could be, for the message to whoever gave a wrong `root`."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointError, TpuEmbedError, UnknownObjectError, UnknownTableError, first_few
from tpuembed.files import FilePath

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint

__all__ = ["naming_roots"]

_SHOWN: Final = 5
_MAX_TRIED: Final = 100
_NO_OBJECT: Final = "\0"
"""A root that no checkpoint has: the error lists those that there are."""


@contextlib.contextmanager
def naming_roots(path: str | FilePath, options: Mapping[str, Any] | None, model: Any) -> Iterator[None]:
    """Have an error of an export with the option `root` list the objects that `model` could be.

    Each object is opened and compared as the export does it with that `root`: what is listed fits.
    """
    try:
        yield
    except (CheckpointError, UnknownObjectError, UnknownTableError) as error:
        options = options or {}
        if model is None or "root" not in options:
            raise
        fitting: list[str] = []
        with contextlib.suppress(Exception):  # whatever a factory does, the error above is the one to tell
            others = {name: value for name, value in options.items() if name != "root"}
            fitting = _fitting(path, others, error, model)
        if fitting and str(options["root"]).strip("/") not in fitting:
            shown = first_few(fitting, _SHOWN)
            text = str(error).partition(". Objects that hold layers")[0]
            remedy = (
                f"{shown}. Give --checkpoint-option root={fitting[0]}" if fitting[0] else "all of it: leave root out"
            )
            error.args = (f"{text}. The model fits {remedy}",)
        raise


def _fitting(path: str | FilePath, others: Mapping[str, Any], error: TpuEmbedError, model: Any) -> list[str]:
    """The paths of the innermost objects with the model's tables and a value for each of its weights; "" for all of it."""
    from tpuembed.export.graph.dense_weights import find_weights
    from tpuembed.export.graph.keras_model import build_model
    from tpuembed.export.graph.stacked_tables import AnyTables

    source = AnyTables()
    built, made = build_model(model, source)

    def fits(checkpoint: "Checkpoint") -> bool:
        tables = checkpoint.tables()
        shapes = {name: (table.rows, table.dim) for name, table in tables.items()}
        if any(shapes.get(name) != shape for name, shape in source.shapes().items()):
            return False
        find_weights(built.model, checkpoint, source.required, made=made)
        return True

    found: list[str] = []
    for root in reversed(_objects(path, others, error)[:_MAX_TRIED]):
        if any(inner.startswith(f"{root}/") for inner in found):
            continue
        with contextlib.suppress(TpuEmbedError), open_checkpoint(path, root=root, **others) as checkpoint:
            if fits(checkpoint):
                found.append(root)
    if not found:
        with contextlib.suppress(TpuEmbedError), open_checkpoint(path, **others) as checkpoint:
            return [""] if fits(checkpoint) else []
    return found[::-1]


def _objects(path: str | FilePath, others: Mapping[str, Any], error: TpuEmbedError) -> tuple[str, ...]:
    if isinstance(error, UnknownObjectError):
        return error.objects
    try:
        open_checkpoint(path, root=_NO_OBJECT, **others).close()
    except UnknownObjectError as listing:
        return listing.objects
    return ()
