"""Compiles the native kernels where optune is built, so that no run waits for a compiler, and none needs one.

A wheel brings them for each level of processors; an editable installation has those of its machine, beside their
sources. Without a compiler there are none: the machine that runs optune makes them then.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Called by hatchling for every wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the compiled kernels to the wheel, or to the checkout where `version` is `editable`."""
        sys.path.insert(0, self.root)
        from optune.native import build

        is_editable = version == "editable"
        self.folder = Path(tempfile.mkdtemp(prefix="optune-kernels-"))
        if not (levels := build.list_levels(here_alone=is_editable)):
            return
        try:
            build.build(self.folder, levels)
        except build.NoLibraryError as error:
            self.app.display_warning(f"without native kernels, which are compiled at the first start then: {error}")
            return
        if is_editable:
            shutil.rmtree(build.BUILT, ignore_errors=True)
            shutil.copytree(self.folder, build.BUILT)
            return
        target = build.BUILT.relative_to(self.root)
        build_data["force_include"].update({str(path): str(target / path.name) for path in self.folder.iterdir()})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sys.platform}_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was compiled; the wheel has it."""
        shutil.rmtree(self.folder, ignore_errors=True)
