"""Makes what the side-by-side runs need: an environment for each tool, the model, the rows.

    python -m scripts.bench setup

Everything lies under --folder and nothing is made twice; about 6 GB, and five minutes where packages come fast. The
model is SmolLM2-135M-Instruct (Apache-2.0) as scripts/get_smollm2 fetches it; the rows are the English conversations of
the package chatterbot-corpus (BSD-3) and the sources of Python's standard library, cut into 256 blocks of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
PACKAGES = {
    "torchtune": ["torchtune==0.6.1", "torchao==0.10.0", "torchdata"],
    "trl": ["trl==1.16.0", "peft==0.21.2", "transformers"],
    "litgpt": ["litgpt==0.5.13"],
    "optune": [],
}
BLOCKS, LENGTH = 256, 512


def default_folder() -> Path:
    """`$BENCH`, or a folder in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return Path(os.environ.get("BENCH", cache / "optune-bench"))


def installed_mib(environment: Path) -> int:
    """What the files of an environment weigh; hard links once."""
    sizes = {}
    for folder, _, names in os.walk(environment):
        for name in names:
            status = os.lstat(Path(folder) / name)
            sizes[status.st_dev, status.st_ino] = status.st_size
    return round(sum(sizes.values()) / 2**20)


def make_environment(folder: Path, tool: str) -> None:
    environment = folder / "venvs" / tool
    wanted = (PACKAGES[tool] or ["optune"])[0].replace("==", "-")
    if list(environment.glob(f"lib/python*/site-packages/{wanted}*.dist-info")):
        return
    say(f"Making the environment of {tool}")
    run(sys.executable, "-m", "venv", "--clear", environment)
    pip(environment, TORCH)
    pip(environment, *(PACKAGES[tool] or [ROOT]))


def install_optune(folder: Path) -> None:
    """The repository as it is now, into optune's environment, as a wheel: what a user gets."""
    wheels = folder / "wheels/optune"
    shutil.rmtree(wheels, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
    (wheel,) = wheels.glob("optune-*.whl")
    pip(folder / "venvs/optune", "--no-deps", "--force-reinstall", wheel)


def make_model(folder: Path) -> None:
    """The model for all tools, and a copy in LitGPT's own format."""
    model, lit = folder / "models/smollm2-135m", folder / "models/lit/SmolLM2-135M-Instruct"
    if not (model / "model.safetensors").exists():
        run("bash", ROOT / "scripts/get_smollm2")
        shutil.copytree(ROOT / "models/SmolLM2-135M-Instruct", model, dirs_exist_ok=True)
    if not (lit / "lit_model.pth").exists():
        say("Converting the model for LitGPT")
        shutil.copytree(model, lit, dirs_exist_ok=True)
        run(folder / "venvs/litgpt/bin/litgpt", "convert_to_litgpt", lit)


def make_rows(folder: Path) -> None:
    path = folder / "data/blocks.jsonl"
    if path.exists():
        return
    say("Making the rows")
    from tokenizers import Tokenizer

    downloads = folder / "wheels"
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", downloads, "chatterbot-corpus")
    tokenizer = Tokenizer.from_file(str(folder / "models/smollm2-135m/tokenizer.json"))
    tokens: list[int] = []
    for text in read_texts(next(downloads.glob("chatterbot_corpus*.whl"))):
        tokens += tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) >= BLOCKS * LENGTH:
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [tokens[start : start + LENGTH] for start in range(0, BLOCKS * LENGTH, LENGTH)]
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))


def read_texts(corpus: Path) -> Iterator[str]:
    """What people say in the corpus, then Python's own sources."""
    import yaml

    with zipfile.ZipFile(corpus) as archive:
        for name in sorted(archive.namelist()):
            if "/english/" in name and name.endswith(".yml"):
                for conversation in yaml.safe_load(archive.read(name))["conversations"]:
                    yield "\n".join(map(str, conversation)) + "\n"
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="ignore")


def pip(environment: Path, *what: str | Path) -> None:
    run(environment / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, cwd=ROOT)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder())
    options = parser.parse_args()
    folder = options.folder.absolute()
    os.environ.setdefault("OPTUNE_PYTHON", sys.executable)  # for scripts/get_smollm2
    for tool in PACKAGES:
        make_environment(folder, tool)
    make_model(folder)
    make_rows(folder)
    for tool in PACKAGES:
        print(f"{tool:10} {installed_mib(folder / 'venvs' / tool):,} MiB installed")


if __name__ == "__main__":
    main()
