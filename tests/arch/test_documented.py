"""What is public is described; what is described exists."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from geo_ray import errors
from geo_ray.job.auto import load_experiment

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))


def error_classes() -> list[type[errors.GeoRayError]]:
    found, waiting = [], [errors.GeoRayError]
    while waiting:
        kind = waiting.pop(0)
        found.append(kind)
        waiting.extend(kind.__subclasses__())
    return [kind for kind in found if inside(kind.__module__, errors.__name__)]


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


# ------------------------------------------------------------------ docstrings


def undescribed(file: Any) -> list[str]:
    found = [] if ast.get_docstring(file.tree) else [file.name]

    def look(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for item in node.body:
            if not isinstance(item, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
            if item.name.startswith("_") or decorators & {"overload", "typing.overload"}:
                continue
            if any(text.endswith((".setter", ".deleter")) for text in decorators):
                continue
            if not ast.get_docstring(item):
                found.append(f"{prefix}.{item.name}")
            if isinstance(item, ast.ClassDef):
                look(item, f"{prefix}.{item.name}")

    look(file.tree, file.name)
    return found


def test_everything_public_has_a_docstring(library: list[Any]) -> None:
    public = [file for file in library if not file.name.split(".")[-1].startswith("_")]
    assert not [name for file in public for name in undescribed(file)]


# ------------------------------------------------------------------ errors


def error_sections() -> dict[str, str]:
    text = (ROOT / "docs" / "errors.md").read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.M)[1:]
    assert len(set(parts[::2])) == len(parts[::2]), "a section is there twice"
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in error_classes()]
    assert sorted(set(codes)) == sorted(codes)


def test_every_code_has_a_section_and_no_section_is_stale() -> None:
    assert set(error_sections()) == {kind.code for kind in error_classes()}


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.code)
def test_sections_say_exit_code_causes_and_remedy(kind: type[errors.GeoRayError]) -> None:
    section = error_sections()[kind.code]
    for line in (f"Exit code: {kind.exit_code}.", "**Meaning.**", "**Causes.**", "**Mend.**"):
        assert line in section


# ------------------------------------------------------------------ configs and commands


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_loads(path: Path) -> None:

    load_experiment(ROOT / path, [])


def quoted_commands() -> dict[str, set[str]]:
    """Commands in code spans and code blocks of the docs and in the advice of errors."""
    texts = {kind.code: kind.advice for kind in error_classes()}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.exists():
            texts[str(path.relative_to(ROOT))] = path.read_text()
    commands: dict[str, set[str]] = {}
    for source, text in texts.items():
        for code in re.findall(r"```.*?```|`[^`]+`", text.replace("\\\n", " "), flags=re.S):
            for rest in re.findall(r"\bgeo-ray ([^\n`|&;#)]+)", code):
                commands.setdefault(rest.strip(), set()).add(source)
    return commands


def complaint(command: click.Command, line: str) -> str:
    """What is wrong with ``geo-ray line``: a verb or an option that does not exist; or nothing."""
    words = line.split()
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        verb = command.get_command(click.Context(command), words[0])
        if verb is None:
            return f"no verb {words[0]}"
        command = verb
        words.pop(0)
    names = {name for param in command.params for name in param.opts + param.secondary_opts}
    known = names | {"--help", "--version"}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    return f"no option {unknown[0]}" if unknown else ""


def test_every_quoted_command_exists() -> None:
    from geo_ray.cli.main import root

    wrong = [
        f"geo-ray {line} ({', '.join(sorted(sources))}): {problem}"
        for line, sources in quoted_commands().items()
        if (problem := complaint(root, line))
    ]
    assert not wrong


def test_the_command_rule_bites() -> None:
    verb = click.Command("train", params=[click.Option(["--set"])])
    group = click.Group("geo-ray", {"train": verb})
    assert complaint(group, "train x.yaml --set a=1") == ""
    assert complaint(group, "train --sett a=1") == "no option --sett"
    assert complaint(group, "trian x.yaml") == "no verb trian"


# ------------------------------------------------------------------ tracked files


def test_no_file_names_a_directory_of_somebodys_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stderr
    private = re.compile(rb"(?<![\w.-])/(?:home|Users|root|work)/[A-Za-z0-9._-]+/")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" not in data[:1024]:
            found += [f"{name}: {match.decode()}" for match in private.findall(data)]
    assert not found


# ------------------------------------------------------------------ links and paths in documents


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


def anchors_of(page: Path) -> set[str]:
    """The anchors that headings get: lower case, without punctuation, dashes for blanks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        missing = anchor and other.suffix == ".md" and other.exists()
        if not other.exists() or (missing and anchor not in anchors_of(other)):
            found.append(f"{page.relative_to(ROOT)}: {target}")
    return found


def test_links_between_documents_lead_somewhere() -> None:
    assert not [link for page in pages() for link in broken_links(page)]


def test_files_that_documents_name_exist() -> None:
    """Dated results are of their day and may name what has moved since."""
    gone = []
    for page in pages():
        if re.match(r"\d{4}-", page.name):
            continue
        for name in re.findall(r"`((?:[\w.]+/)+[\w.]+\.py)`", page.read_text()):
            if not ((ROOT / name).exists() or (ROOT / "geo_ray" / name).exists()):
                gone.append(f"{page.relative_to(ROOT)}: {name}")
    assert not gone
