"""What is public is described; what is described exists."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from geo_ray.api.auto import load_experiment
from geo_ray.base import errors
from geo_ray.base.errors import every_class
from geo_ray.base.load import load_tree
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.sweep.search_config import TuningConfig
from geo_ray.telemetry.events import EVENT_FIELDS, OPTIONAL_FIELDS
from geo_ray.testing.reference_pages import EVENTS, FIELDS, errors_page
from geo_ray.testing.reference_pages import pages as generated_pages

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))


ERRORS = every_class()


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


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in ERRORS]
    assert sorted(set(codes)) == sorted(codes)


def test_every_class_is_exported_and_comes_from_the_tree() -> None:
    for kind in ERRORS:
        assert vars(errors)[kind.__name__] is kind
        assert kind.__module__ == "geo_ray.base.errors"


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.code)
def test_every_class_says_itself_what_its_section_needs(kind: type[errors.GeoRayError]) -> None:
    own = vars(kind)
    assert {"code", "causes", "__doc__"} <= set(own)
    assert kind.__subclasses__() or "advice" in own, "only a family may leave its advice out"
    assert kind is errors.GeoRayError or kind.chapter
    for text in (kind.__doc__ or "", kind.causes, kind.advice, own.get("more", "x.")):
        assert text.rstrip()[-1] in ".!?`", text


@pytest.mark.parametrize("name", sorted(generated_pages()))
def test_generated_pages_are_up_to_date(name: str) -> None:
    """If this fails: `python -m geo_ray.testing.reference_pages docs/reference/generated`."""
    generated = ROOT / "docs" / "reference" / "generated" / name
    assert generated.read_text(encoding="utf-8") == generated_pages()[name]


FURTHER_FIELDS = {"run_started": {"resumed_step"}, "members_refused": {"request"}}


def test_every_event_and_field_is_described() -> None:
    assert set(EVENTS) == set(EVENT_FIELDS)
    for kind, (when, meanings) in EVENTS.items():
        known = {**EVENT_FIELDS[kind], **OPTIONAL_FIELDS.get(kind, {})}
        assert when.endswith(".")
        assert not [name for name in known if name not in meanings and name not in FIELDS], kind
        assert set(meanings) - set(known) <= FURTHER_FIELDS.get(kind, set()), kind


def test_the_page_has_a_section_for_every_code() -> None:
    assert re.findall(r"^### (.+)$", errors_page(), flags=re.M) == [
        *[errors.GeoRayError.code],
        *[kind.code for kind in sorted(ERRORS[1:], key=chapter_first)],
    ]
    for kind in ERRORS:
        assert (
            f"### {kind.code}\n\nExit code: {kind.exit_code}. Class: `{kind.__name__}`"
            in errors_page()
        )


def chapter_first(kind: type[errors.GeoRayError]) -> int:
    (root,) = [one for one in errors.GeoRayError.__subclasses__() if issubclass(kind, one)]
    return root.exit_code


# ------------------------------------------------------------------ configs and commands


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_loads(path: Path) -> None:
    if path.name == "tune.yaml":  # a search, which has a configuration as its base
        load_tree(ROOT / path, [], TuningConfig)
        return
    if path.name in ("queue.yaml", "queue_local.yaml"):
        load_tree(ROOT / path, [], QueueConfig)
        return
    load_experiment(ROOT / path, [])


def text_of(node: ast.expr) -> str:
    """The words of a string, with X for what is put in; several strings of a choice as lines."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(p) if isinstance(p, ast.Constant) else "X" for p in parts)
        case ast.IfExp(body=one, orelse=other):
            return f"{text_of(one)}\n{text_of(other)}"
        case _:
            return ""


def fixes(library: list[Any]) -> dict[str, str]:
    """What single errors advise, by place."""
    return {
        f"{file.name}:{keyword.value.lineno}": text
        for file in library
        for node in file.nodes
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "fix" and (text := text_of(keyword.value))
    }


def test_fixes_are_sentences_and_name_files_that_exist(library: list[Any]) -> None:
    found = fixes(library)
    assert len(found) > 150
    texts = found | {kind.code: f"{kind.advice} {kind.more}" for kind in ERRORS}
    for place, text in texts.items():
        for name in re.findall(r"\b(?:docs|configs)/[\w/]+\.\w+", text):
            assert (ROOT / name).exists(), f"{place}: {name}"
    for place, text in found.items():
        first, last = text.lstrip()[0], text.rstrip()[-1]
        assert first.isupper() or first in "`X", f"{place}: {text}"
        assert last in ".:?X", f"{place}: {text}"


def quoted_commands(library: list[Any]) -> dict[str, set[str]]:
    """Commands in code spans and code blocks of the docs and in the advice of errors."""
    texts = {kind.code: f"{kind.advice} {kind.more}" for kind in ERRORS} | fixes(library)
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


def test_every_quoted_command_exists(library: list[Any]) -> None:
    from geo_ray.cli.main import root

    wrong = [
        f"geo-ray {line} ({', '.join(sorted(sources))}): {problem}"
        for line, sources in quoted_commands(library).items()
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


# Files of examples that a guide has its reader write.
OF_EXAMPLES = {
    "churn.py",
    "digits_task.py",
    "lm.py",
    "make_data.py",
    "make_files.py",
    "make_tokenizer.py",
    "my_loop.py",
    "pack_text.py",
    "photos.py",
    "train_ddp.py",
    "train_lora.py",
    "waves.py",
}


def test_files_that_documents_name_exist() -> None:
    """Dated results are of their day and may name what has moved since."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    known = {Path(name).name for name in listed} | OF_EXAMPLES
    gone = []
    for document in pages():
        if re.match(r"\d{4}-", document.name):
            continue
        text = document.read_text()
        names = re.findall(r"`((?:[\w.]+/)*[\w.]+\.py)`", text)
        names += re.findall(r"`(geo_ray/(?:\w+/)*)`", text)
        for name in names:
            exists = (ROOT / name).exists() or (ROOT / "geo_ray" / name).exists()
            if not exists and ("/" in name or name not in known):
                gone.append(f"{document.relative_to(ROOT)}: {name}")
    assert not gone


# ------------------------------------------------------------------ size of documents

MOST_WORDS = 2000
MOST_COLUMNS = 120


def written_pages() -> list[Path]:
    """Pages that people write and maintain: no generated and no archived ones."""
    return [
        page
        for page in pages()
        if page.name == "README.md" or "docs" in page.parts
        if not {"generated", "archive"} & set(page.parts)
    ]


def long_lines(page: Path) -> list[str]:
    """Lines of prose that are too long; code, tables and lines with a link may be."""
    text = re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    lines = (line for line in text.splitlines() if not line.startswith("|"))
    return [line for line in lines if len(line) > MOST_COLUMNS and not re.search(r"\]\(|//", line)]


def test_a_page_is_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in written_pages()}
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}


def test_lines_of_pages_are_wrapped() -> None:
    assert {page.name: found for page in written_pages() if (found := long_lines(page))} == {}
