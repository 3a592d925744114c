"""Model folders as a user names them: a model, a checkpoint, an adapter, or the run folder around one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optune.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_STORED = {"BF16": "bf16", "F16": "fp16"}


@dataclass(frozen=True)
class ModelFolder:
    """Where weights are: `base` is the model's folder, `adapter` that of the adapter on top, if there is one."""

    base: Path
    adapter: Path | None = None

    def holder_of(self, name: str) -> Path:
        """The folder whose file counts: the adapter's own where it brings one, else the base's."""
        return self.adapter if self.adapter and (self.adapter / name).is_file() else self.base


def find(name: str) -> ModelFolder:
    """The model behind a folder or hub id. A run folder stands for the result in it.

    Raises ModelError or ConfigError, with the absolute path, where there is none.
    """
    from optune import lora, models

    folder = Path(name).expanduser()
    if not _holds_model(folder) and _holds_model(folder / "model"):
        folder = folder / "model"
    if folder.is_dir() and not _holds_model(folder):
        saved = sorted(folder.glob("checkpoints/step-*"))
        hint = f"give one of its checkpoints: {saved[-1]}" if saved else None
        raise ModelError(
            "holds no model: no config.json, no adapter_config.json", where=str(folder.absolute()), hint=hint
        )
    config = folder.absolute() / lora.CONFIG_FILE
    if not config.is_file():
        return ModelFolder(models.resolve(folder if folder.is_dir() else name))
    base = lora.read_config(folder).base
    if not base:
        raise ConfigError("base_model_name_or_path is not set: the adapter names no model", where=str(config))
    try:
        return ModelFolder(models.resolve(base), folder.absolute())
    except ModelError as error:
        hint = error.hint or "correct base_model_name_or_path in that file"
        raise ModelError(f"the adapter belongs to {base!r}: {error}", where=str(config), hint=hint) from error


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def read_dtype(folder: Path) -> str:
    """The dtype in which a model's weights are stored: bf16, fp16 or fp32."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    return _STORED.get(tensors.get_slice(name).get_dtype(), "fp32")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"the file is damaged or cut short ({error})", where=str(file), hint="copy or download the model again"
            ) from error
    return "fp32"


def load(folder: ModelFolder, dtype: str, device: torch.device) -> Any:
    """The decoder in `folder`, with its adapter on top; the base is held as it was when the adapter was trained."""
    import torch

    from optune import lora
    from optune.export import load_base

    quantization = lora.read_quantization(folder.adapter) if folder.adapter else None
    model = load_base(folder.base, getattr(torch, _TORCH_NAMES[dtype]), quantization, device)
    if folder.adapter:
        lora.load(model, folder.adapter)
    return model.to(device).eval()
