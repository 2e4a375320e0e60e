"""The destination of an export to a store."""

import dataclasses
import functools

from tpuembed.errors import ConfigError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.publish.folder import check_version
from tpuembed.export.publish.layouts import Layout, choose_layout
from tpuembed.export.publish.reuse import SameTables
from tpuembed.export.publish.store.failing import failing
from tpuembed.export.publish.store.parts import check_sizes
from tpuembed.export.publish.store.staging import StoreStaging
from tpuembed.export.publish.store.version_lease import StoreModelDir, check_free, list_versions
from tpuembed.export.stream.execute import StreamReport
from tpuembed.export.stream.resume_log import Header
from tpuembed.files import UrlPath
from tpuembed.files.bucket import Bucket

__all__ = ["Store"]


@dataclasses.dataclass(frozen=True)
class Store:
    """A `Destination` in a bucket."""

    path: UrlPath

    @functools.cached_property
    def _root(self) -> StoreModelDir:
        with failing(self.path):
            return StoreModelDir(self.path, Bucket(self.path.bucket))

    def check(self, plan: ExportPlan, options: ExportOptions) -> None:
        """See Destination."""
        check_version(options.version)
        check_sizes(plan)
        if options.layout == "mmap" and options.serving_root is None:
            raise ConfigError(
                f"MODEL_DIR {self.path}: a server cannot map files of a store. Name the folder that versions will "
                "be copied to, or mounted at, with serving_root (--serving-root ROOT), or choose layout "
                "'variables'."
            )

    def check_room(self, plan: ExportPlan, header: Header | None, options: ExportOptions, *, is_shared: bool) -> None:  # noqa: ARG002 - as Destination
        """See Destination. Only the version is checked: a store has no limit on space."""
        root = self._root
        with failing(self.path):
            check_free(root, options.version, list_versions(root))

    def same_tables(self, key: str) -> SameTables | None:  # noqa: ARG002 - as Destination
        """See Destination. Always None: an object has only one name."""
        return None

    def share(self, *_: object) -> StreamReport | None:
        """See Destination."""
        return None

    def layout(self, options: ExportOptions) -> Layout:
        """See Destination."""
        return choose_layout(options.layout, None, options.serving_root)

    def stage(self, options: ExportOptions, header: Header | None) -> StoreStaging:
        """See Destination."""
        return StoreStaging(self._root, options.version, header, restart=not options.resume)
