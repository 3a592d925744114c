"""Sources of the native libraries for CPUs, and how they are compiled; nothing here needs torch."""

from optune.native.build import NoLibraryError, make_kernels, make_memory, start_making

__all__ = ["NoLibraryError", "make_kernels", "make_memory", "start_making"]
