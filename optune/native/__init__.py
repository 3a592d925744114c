"""Sources of the native libraries for CPUs, and how they are compiled; nothing here needs torch."""

from optune.native.build import NoLibraryError, is_amd_without_tiles, make_kernels, make_memory, start_making

__all__ = ["NoLibraryError", "is_amd_without_tiles", "make_kernels", "make_memory", "start_making"]
