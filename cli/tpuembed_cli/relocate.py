"""`tpuembed relocate`: changes the paths of mapped tables, for another machine or a container."""

from pathlib import Path

import click

from tpuembed.errors import ConfigError
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH
from tpuembed_cli.output import print_json

__all__ = ["relocate"]


@click.command(
    cls=Command,
    short_help="Change the folder that an export maps tables from.",
    examples=("tpuembed relocate models/rec /srv/models/rec",),
)
@click.argument("export", type=PATH)
@click.argument("root", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def relocate(export: str, root: str, as_json: bool) -> None:
    """Change EXPORT, of layout mmap, to map its tables from ROOT/<version>/.

    EXPORT is a version, or a MODEL_DIR with its newest version. ROOT is the absolute path of MODEL_DIR as the server
    sees it. tpuembed's own server does not need this: it maps the tables of the version that it loads.
    """
    from tpuembed.checkpoint.tools import require_export
    from tpuembed.formats.saved_model import relocate_export

    version, manifest = require_export(export)
    if not isinstance(version, Path):
        raise ConfigError(
            f"{version}: an export in a store cannot be changed. Copy it to a disk, and relocate the copy."
        )
    done = relocate_export(version, manifest, root)
    if as_json:
        print_json(done.to_dict())
        return
    click.echo(f"{done.path}: {'now' if done.changed else 'already'} maps {', '.join(done.files.values())}")
    if not done.found:
        click.echo(
            f"Files not checked, because this folder is not on this machine: {root}/{done.path.absolute().name}",
            err=True,
        )
