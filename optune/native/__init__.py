"""Sources of the native kernels for CPUs, and how they are compiled; nothing here needs torch."""

from optune.native.build import NoKernelsError, make_library, start_making

__all__ = ["NoKernelsError", "make_library", "start_making"]
