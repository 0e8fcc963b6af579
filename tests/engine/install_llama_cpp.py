"""Builds a virtual environment with a real llama.cpp that runs on a CPU, apart from the project's own.

usage: python tests/engine/install_llama_cpp.py [FOLDER]

FOLDER is HEADWAY_LLAMA_CPP_VENV or `.venv-llama-cpp` by default; takes seconds and about 200 MB. A
finished environment is left as it is. `bin/llama-server` there is `llama_server.py`.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
FINISHED = ".headway-finished"


def environment_folder() -> Path:
    root = Path(__file__).parents[2]
    return Path(os.environ.get("HEADWAY_LLAMA_CPP_VENV") or root / ".venv-llama-cpp").absolute()


def install(folder: Path) -> None:
    if (folder / FINISHED).exists():
        return
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES],
        check=True,
    )
    program = folder / "bin" / "llama-server"
    source = Path(__file__).with_name("llama_server.py")
    program.write_text(f"#!{python}\n{source.read_text()}")
    program.chmod(0o755)
    subprocess.run([program, "--help"], check=True, capture_output=True)
    (folder / FINISHED).touch()


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else environment_folder())
