"""`tpuembed relocate`: the paths of mapped tables, for another machine or a container."""

from pathlib import Path

import click

from tpuembed.errors import ConfigError
from tpuembed_cli.output import print_json

__all__ = ["relocate"]


@click.command()
@click.argument("export")
@click.argument("root")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def relocate(export: str, root: str, as_json: bool) -> None:
    """Have EXPORT, of layout mmap, map its tables from ROOT/<version>/.

    EXPORT is a version or a MODEL_DIR, whose newest version it is then; ROOT is the absolute path of MODEL_DIR as the server
    sees it. tpuembed's own server needs none of this: it maps the tables of the version that it loads.
    """
    from tpuembed.checkpoint.tools import find_export
    from tpuembed.saved_model import relocate_export

    found = find_export(export)
    if found is None:
        raise ConfigError(f"{export}: no export of tpuembed, nor a folder of them; name a version or a MODEL_DIR")
    version, manifest = found
    if not isinstance(version, Path):
        raise ConfigError(f"{version}: an export in a store is not changed; copy it to a disk, and relocate the copy")
    done = relocate_export(version, manifest, root)
    if as_json:
        print_json(done.to_dict())
        return
    click.echo(f"{done.path}: {'now' if done.changed else 'already'} maps {', '.join(done.files.values())}")
    if not done.found:
        click.echo(f"not on this machine, so not looked at: {root}", err=True)
