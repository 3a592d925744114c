"""Models: one native decoder for the Llama line, and weights from and to Hugging Face folders.

`load` (`fill` for a model that is spread over processes) and `save` are what a recipe needs; `check` finds every
objection before weights are read. To add a family see `families.py`.
"""

from optune.models.cache import Cache
from optune.models.decoder import BlockContext, Decoder, outline
from optune.models.families import FAMILIES, DecoderConfig
from optune.models.fingerprint import fingerprint
from optune.models.hub import download, resolve
from optune.models.offloading import check_offloading
from optune.models.saving import copy_companions, save
from optune.models.weights import check, fill, load
from optune.types import DTYPES

__all__ = [
    "DTYPES",
    "FAMILIES",
    "BlockContext",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "check",
    "check_offloading",
    "copy_companions",
    "download",
    "fill",
    "fingerprint",
    "load",
    "outline",
    "resolve",
    "save",
]
