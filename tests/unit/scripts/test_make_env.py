"""The pins of the environment, and what uv is told of pip's settings."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PINS = ROOT / "requirements"


def make_env() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("make_env", ROOT / "scripts" / "make_env.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ pins


def pins_in(path: Path) -> dict[str, list[Requirement]]:
    """Requirements of a file without their hashes, by name."""
    found: dict[str, list[Requirement]] = {}
    for line in re.findall(r"^[A-Za-z][^\\\n]*", path.read_text(), flags=re.M):
        requirement = Requirement(line)
        found.setdefault(requirement.name.lower().replace("_", "-"), []).append(requirement)
    return found


def test_every_requirement_of_the_project_has_a_pin_that_meets_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *map(Requirement, project["project"]["dependencies"]),
        *map(Requirement, extras["dev"]),
        *map(Requirement, project["build-system"]["requires"]),
    ]
    for own in [each for each in wanted if each.name == project["project"]["name"]]:
        wanted.remove(own)  # `geo_ray[export]` stands for what that extra lists
        wanted += [Requirement(text) for extra in own.extras for text in extras[extra]]
    pins = pins_in(PINS / "locked.txt") | pins_in(PINS / "torch.txt")
    for requirement in wanted:
        for pin in pins[requirement.name.lower().replace("_", "-")]:
            (version,) = pin.specifier
            assert version.operator == "=="
            assert requirement.specifier.contains(version.version), f"{pin}: run scripts/lock"


def test_everything_but_torch_has_hashes() -> None:
    for name in ("locked.txt", "uv.txt"):
        blocks = re.split(r"^(?=[A-Za-z])", (PINS / name).read_text(), flags=re.M)[1:]
        assert blocks
        assert not [block for block in blocks if "--hash=sha256:" not in block]
    assert "--hash" not in (PINS / "torch.txt").read_text()
    assert "torch" in pins_in(PINS / "torch.txt")
    assert not [name for name in pins_in(PINS / "locked.txt") if re.match("nvidia|cuda", name)]


# ------------------------------------------------------------------ what pip knows


def test_a_variable_comes_before_install_and_that_before_global() -> None:
    listing = (
        ":env:.find-links='/mine'\n"
        "global.find-links='/wheels'\n"
        "global.timeout='9'\n"
        "install.timeout='7'\n"
        "global.extra-index-url='\\nfile:///a\\nfile:///b'\n"
    )
    assert make_env().pip_settings(listing) == {
        "find-links": "/mine",
        "timeout": "7",
        "extra-index-url": "file:///a\nfile:///b",
    }


def test_uv_is_told_what_pip_knows_and_its_own_variables_win() -> None:
    script = make_env()
    settings = {
        "index-url": "file:///main",
        "extra-index-url": "file:///a\nfile:///b",
        "find-links": "/wheels /more",
        "cert": "/ca.pem",
        "default-timeout": "180",
        "no-index": "true",
        "quiet": "1",
    }
    told = script.uv_environment(settings, {"HOME": "/h", "SSL_CERT_FILE": "/own.pem"})
    assert told == {
        "HOME": "/h",
        "SSL_CERT_FILE": "/own.pem",
        "UV_DEFAULT_INDEX": "file:///main",
        "UV_EXTRA_INDEX_URL": "file:///a file:///b",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert "UV_DEFAULT_INDEX" not in script.uv_environment(settings, {"UV_INDEX_URL": "x"})
    assert script.uv_command("uv", settings)[-1] == "--no-index"
    assert "--no-index" not in script.uv_command("uv", {})
