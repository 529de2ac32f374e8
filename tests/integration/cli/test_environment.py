"""The environment is made for real, for a small project whose packages are made on the spot."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UV = shutil.which("uv")

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
dependencies = ["alpha", "torch"]
"""
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
TINY = "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n"
BACKEND = f"""
import zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    if (config_settings or {{}}).get("editable_mode") != "compat":
        raise SystemExit("an import hook is hidden by a clone beside the user's script")
    with zipfile.ZipFile(f"{{directory}}/tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny-1.dist-info/METADATA", {TINY!r})
        wheel.writestr("tiny-1.dist-info/WHEEL", {WHEEL!r})
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    return "tiny-1-py3-none-any.whl"
"""
MODULES = {"ray.py": b"", "sklearn/__init__.py": b"", "sklearn/datasets.py": b""}
SHOW = """
from importlib.metadata import distributions
found = {d.name: d.version for d in distributions()}
print(sorted(f"{name}=={found[name]}" for name in found if name not in ("pip", "setuptools")))
"""


def add_wheel(
    index: Path, name: str, version: str, files: dict[str, bytes], requires: str = ""
) -> str:
    """Puts a wheel into a folder that is a package index; returns the line that pins it."""
    info = f"{name}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires:
        about += f"Requires-Dist: {requires}\n"
    files = files | {f"{info}/METADATA": about.encode(), f"{info}/WHEEL": WHEEL.encode()}
    record = ""
    for file, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        record += f"{file},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = index / name / f"{name}-{version}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for file, data in files.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = 0o100755 << 16  # programs in it can be run
            wheel.writestr(entry, data)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with (path.parent / "index.html").open("a") as page:
        page.write(f'<a href="{path.name}#sha256={digest}">{path.name}</a><br>\n')
    return f"{name}=={version} --hash=sha256:{digest}\n"


Command = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project of two packages, one of which is built with CUDA and, elsewhere, without."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("_env", "make_env.py"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts")
    (checkout / "pyproject.toml").write_text(PROJECT)
    (checkout / "backend.py").write_text(BACKEND)
    main, extra = tmp_path / "main", tmp_path / "extra"
    add_wheel(main, "torch", "1.0", {"torch.py": b""}, requires="nvidia-x==1")
    add_wheel(main, "nvidia-x", "1", {})
    add_wheel(extra, "torch", "1.0+cpu", {"torch.py": b""})
    pins = checkout / "requirements"
    pins.mkdir()
    (pins / "locked.txt").write_text(add_wheel(main, "alpha", "1", MODULES))
    (pins / "torch.txt").write_text("nvidia-x==1\ntorch==1.0\n")
    (pins / "uv.txt").write_text("uv==0 --hash=sha256:" + "0" * 64)
    (tmp_path / "bin").mkdir()
    return checkout


@pytest.fixture
def command(checkout: Path, tmp_path: Path) -> Iterator[Command]:
    """Starts a script that makes the environment and shows what is in it."""
    bash = shutil.which("bash")
    assert bash
    environment = {
        "HOME": str(tmp_path),
        "PATH": str(tmp_path / "bin"),
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (tmp_path / "main").as_uri(),
        "PIP_EXTRA_INDEX_URL": (tmp_path / "extra").as_uri(),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_NO_CONFIG": "1",
        "SHOW": SHOW,
    }
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [bash, "-c", 'source scripts/_env; python -c "$SHOW"'],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize("has_uv", [True, False], ids=["uv as a wheel", "pip"])
def test_two_commands_at_once_make_one_environment(
    checkout: Path, command: Command, tmp_path: Path, has_uv: bool
) -> None:
    installed = ["alpha==1", "tiny==1", "torch==1.0+cpu"]
    by = "uv cannot be had.*\n.* pip installs"
    if has_uv:
        if not UV:
            pytest.skip("there is no uv here")
        program = Path(UV).read_bytes()
        pin = add_wheel(tmp_path / "main", "uv", "1", {"uv-1.data/scripts/uv": program})
        (checkout / "requirements" / "uv.txt").write_text(pin)
        installed.append("uv==1")
        by = "uv [0-9.]+ installs"

    both = [command(), command()]
    said = ""
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.strip() == str(installed)
        said += err
    assert said.count("Making the environment") == 1
    assert re.search(by, said), said
    assert " s  ready" in said


def test_a_wrong_package_is_refused_and_a_changed_pin_is_followed(
    checkout: Path, command: Command, tmp_path: Path
) -> None:
    if UV:
        (tmp_path / "bin" / "uv").symlink_to(UV)
    by = "uv [0-9.]+ installs" if UV else "pip installs"
    pins = checkout / "requirements" / "locked.txt"
    right = pins.read_text()
    pins.write_text(right[: right.index(":") + 1] + "0" * 64)
    failed = command()
    _, err = failed.communicate()
    assert failed.returncode == 1
    assert "could not be made" in err
    assert "hash" in err.lower()

    for text, version, anew in [
        (right, "1", True),
        (add_wheel(tmp_path / "main", "alpha", "2", MODULES), "2", False),
    ]:
        pins.write_text(text)
        process = command()
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert f"['alpha=={version}', 'tiny==1', 'torch==1.0+cpu']" in out
        assert re.search(by, err)
        assert ("begun anew" in err) == anew

    process = command()
    assert "alpha==2" in process.communicate()[0]
    out, err = command().communicate()
    assert not err
