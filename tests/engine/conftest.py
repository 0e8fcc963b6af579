"""The environment with vLLM and the tiny model, shared by all tests of real engines."""

import subprocess
from pathlib import Path

import pytest

from tests.engine import install_llama_cpp
from tests.engine.install_vllm import FINISHED, environment_folder


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop for all tests of a file, whose engines take a minute to start."""
    return "asyncio"


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The virtual environment that `install_vllm.py` builds; without it the tests are skipped."""
    folder = environment_folder()
    if not (folder / FINISHED).exists():
        pytest.skip(f"no vLLM in {folder}; run tests/engine/install_vllm.py")
    return folder


@pytest.fixture(scope="session")
def model(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    maker = Path(__file__).with_name("tiny_model.py")
    subprocess.run([vllm / "bin" / "python", maker, folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The `llama-server` that `install_llama_cpp.py` builds; without it the tests are skipped."""
    folder = install_llama_cpp.environment_folder()
    if not (folder / install_llama_cpp.FINISHED).exists():
        pytest.skip(f"no llama.cpp in {folder}; run tests/engine/install_llama_cpp.py")
    return folder / "bin" / "llama-server"


@pytest.fixture(scope="session")
def gguf(llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    maker = Path(__file__).with_name("tiny_gguf.py")
    python = llama_server.with_name("python")
    subprocess.run([python, maker, file], check=True, capture_output=True)
    return file
