"""The options of `tpuembed export` for a retrieval."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from tpuembed.export.options import ExportOptions
from tpuembed_cli.options import PATH, option_group

if TYPE_CHECKING:
    from tpuembed.manifest import RetrievalEntry

__all__ = ["SECTION", "report_line", "retrieval_options", "retrieval_request"]

_OPTIONS: Final = (
    click.option(
        "--retrieve-from",
        metavar="SOURCE",
        help="With --model, the tower of the query: find the best of these candidates. SOURCE is table:NAME, MODULE:FACTORY or "
        "FILE.npy; FACTORY() returns (the candidates' tower, a dataset).",
    ),
    click.option(
        "--k", type=click.IntRange(min=1), metavar="N", help="How many candidates a request gets. Default: 100."
    ),
    click.option(
        "--index",
        type=click.Choice(["auto", "exact", "ivf"]),
        help="exact: compare with all candidates. ivf: with those of the nearest partitions. Default: auto, which is ivf above "
        "200,000 candidates.",
    ),
    click.option(
        "--candidate-ids",
        "ids",
        type=PATH,
        metavar="FILE",
        help="Ids of the candidates of a table or FILE.npy: .npy, or a text file with a name per line.",
    ),
    click.option(
        "--candidate-tags",
        "tags",
        type=PATH,
        metavar="FILE.npy",
        help="Tags of the same candidates: uint64, a bit for each tag.",
    ),
    click.option(
        "--queries",
        type=PATH,
        metavar="FILE",
        help="Inputs of the model to measure the recall with: .npy, or .npz for several inputs.",
    ),
    click.option(
        "--min-recall",
        type=click.FloatRange(min=0, min_open=True, max=1),
        metavar="X",
        help="For ivf: search so many partitions that X of the K best candidates are found on average. Default: 0.95.",
    ),
)
_NAMES: Final = ("k", "index", "ids", "tags", "queries", "min_recall")
"""Of the options beside --retrieve-from, which are those of the arguments of `export_retrieval`."""
SECTION: Final = (
    *("--retrieve-from", "--k", "--index"),
    *("--candidate-ids", "--candidate-tags", "--queries", "--min-recall"),
)
"""The flags of the options."""

retrieval_options = option_group(_OPTIONS)
"""Adds the options to a command."""


def retrieval_request(request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the request without the options of a retrieval, and the arguments of `export_retrieval`, or None.

    Raises:
        click.UsageError: an option is given that the kind of export does not have.
    """
    rest = {name: value for name, value in request.items() if name not in _NAMES and name != "retrieve_from"}
    given = {name: request[name] for name in _NAMES if request[name] is not None}
    source = request["retrieve_from"]
    if source is None:
        if given:
            flag = _flag(next(iter(given)))
            raise click.UsageError(f"{flag} needs --retrieve-from. Give it, or leave {flag} out.")
        return rest, None
    if rest["model"] is None:
        raise click.UsageError("--retrieve-from needs --model, the tower of the query. Give --model MODULE:FACTORY.")
    own = ExportOptions.__dataclass_fields__.keys() - {"base"} | {"model", "model_dir", "checkpoint_options"}
    context = click.get_current_context()
    for name in rest.keys() - own:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:  # 0 is a value too
            raise click.UsageError(f"{_flag(name)}: an export with --retrieve-from does not have it. Leave it out.")
    arguments = {name: value for name, value in rest.items() if name in own and name != "model"}
    return rest, {**arguments, "query": rest["model"], "candidates": source, **given}


def report_line(entry: "RetrievalEntry") -> str:
    """Return what an export of a retrieval has, as text."""
    ids = f"{entry.candidates:,} candidates, the best {entry.k}, index {entry.index}"
    if entry.index == "exact":
        return ids
    recall = dict(entry.recall)[entry.nprobe]
    return (
        f"{ids}: a search of {entry.nprobe} of {entry.partitions} partitions finds {recall:.1%} of them, measured on "
        f"{entry.measured_on}"
    )


def _flag(name: str) -> str:
    """Return the flag of the running command's option `name`."""
    return next(one.opts[0] for one in click.get_current_context().command.params if one.name == name)
