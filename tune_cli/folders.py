"""Model folders as a user names them: a model, a checkpoint, an adapter, or the run folder around one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optune.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_STORED = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True)
class ModelFolder:
    """Where weights are: `base` is the model's folder, `adapter` that of the adapter on top, if there is one."""

    base: Path
    adapter: Path | None = None

    @property
    def own(self) -> Path:
        """The folder that the user named; its tokenizer and template are the ones to use."""
        return self.adapter or self.base


def find(name: str) -> ModelFolder:
    """The model behind a folder or hub id. A run folder stands for the result in it.

    Raises ModelError or ConfigError, with the absolute path, where there is none.
    """
    from optune import lora, models

    folder = Path(name).expanduser()
    if not _holds_model(folder) and _holds_model(folder / "model"):
        folder = folder / "model"
    if not (folder / lora.CONFIG_FILE).is_file():
        return ModelFolder(models.resolve(str(folder) if folder.is_dir() else name))
    base = lora.read_config(folder).base
    if not base:
        raise ConfigError("does not name the model it belongs to", where=str(folder.absolute() / lora.CONFIG_FILE))
    try:
        return ModelFolder(models.resolve(base), folder.absolute())
    except ModelError as error:
        raise ModelError(
            f"the adapter belongs to {base!r}, which is not to be had: {error}",
            where=str(folder.absolute() / lora.CONFIG_FILE),
            hint=error.hint or "correct base_model_name_or_path in that file",
        ) from error


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def read_dtype(folder: Path) -> str:
    """The dtype in which a model's weights are stored: bf16, fp16 or fp32."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                return _STORED.get(tensors.get_slice(name).get_dtype(), "fp32")
    return "fp32"


def to_torch(dtype: str) -> torch.dtype:
    """bf16, fp16 or fp32 as torch names it."""
    import torch

    return getattr(torch, DTYPES[dtype])


def load(folder: ModelFolder, dtype: str, device: Any = "cpu") -> Any:
    """The decoder in `folder`, with its adapter on top."""
    from optune import lora, models

    model = models.load(folder.base, dtype=to_torch(dtype), device=device)
    if folder.adapter:
        lora.load(model, folder.adapter)
        model.to(device)
    return model.eval()
