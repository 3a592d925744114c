"""Checkpoints: folders that appear whole, are proven by sums before they are used, and hold no pickle.

    checkpoints/step-000120/
      model files                    what `write_model` wrote: opens in transformers or PEFT as it is
      optune/optimizer.safetensors   keys state.<parameter name>.<state name>
      optune/optimizer.json          settings, and every state value that is not a tensor
      optune/progress.json           step, epoch, rows and targets seen, fingerprint, versions
      optune/manifest.json           size and sha256 of every file, written last

`Saver` is what a recipe uses; the functions below it work on any checkpoint folder.
"""

from optune.checkpoint.background import Saver, SaveReport
from optune.checkpoint.comparing import compare
from optune.checkpoint.folders import find, list_checkpoints, prune, resolve, say_on_stderr, set_aside_newer
from optune.checkpoint.manifest import check, verify
from optune.checkpoint.optimizer_state import load_optimizer
from optune.checkpoint.progress import (
    Difference,
    compare_fingerprints,
    compare_versions,
    make_fingerprint,
    read_progress,
    refuse_changes,
)
from optune.checkpoint.rehearsal import Rehearsal, estimate_state_bytes, rehearse
from optune.checkpoint.writing import count_nonfinite, save

__all__ = [
    "Difference",
    "Rehearsal",
    "SaveReport",
    "Saver",
    "check",
    "compare",
    "compare_fingerprints",
    "compare_versions",
    "count_nonfinite",
    "estimate_state_bytes",
    "find",
    "list_checkpoints",
    "load_optimizer",
    "make_fingerprint",
    "prune",
    "read_progress",
    "refuse_changes",
    "rehearse",
    "resolve",
    "save",
    "say_on_stderr",
    "set_aside_newer",
    "verify",
]
