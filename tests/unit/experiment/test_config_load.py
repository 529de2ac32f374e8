"""Reading, writing and comparing configuration trees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from geo_ray.base.describe import describe
from geo_ray.base.errors import ConfigError
from geo_ray.base.load import diff, digest, dump_yaml, json_schema, load_text, load_tree
from geo_ray.base.model import StrictModel
from geo_ray.base.yaml import MAX_FILE_BYTES


class Asgd(StrictModel):
    kind: Literal["asgd"] = "asgd"
    interval: int = Field(1, ge=1, description="Steps between\n two updates.")


class Diloco(StrictModel):
    kind: Literal["diloco"] = "diloco"
    outer_lr: float = Field(0.7, gt=0)


Strategy = Annotated[Asgd | Diloco, Field(discriminator="kind")]


class Region(StrictModel):
    workers: int
    note: str | None = None
    secret_token: int | None = None

    @model_validator(mode="after")
    def _limits(self) -> Region:
        if self.note == "bad":
            raise ValueError("note must not be bad")
        return self


class Root(StrictModel):
    steps: int = Field(ge=1)
    lr: float = 0.1
    strategy: Strategy = Asgd()
    regions: dict[str, Region] = Field(default_factory=dict)
    strategies: tuple[Strategy, ...] = ()
    maybe: Strategy | None = None
    mixed: int | str | None = None
    pair: tuple[int, str] = (1, "a")


def load(text: str, *overrides: str) -> Root:
    return load_text(text, overrides, Root, "job.yaml")


def complaint(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


# ------------------------------------------------------------------ values


def test_defaults_fill_what_the_file_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("steps: 3\n")
    assert load_tree(file, [], Root) == Root(steps=3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000", 1000),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2026-01-02", "2026-01-02"),
        ("true", True),
        ("'true'", "true"),
        ("~", None),
        ("", None),
        ("<<", "<<"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    class Anything(StrictModel):
        x: Any = "unset"

    loaded = load_text(f"x: {text}", [], Anything, "t").x
    assert (type(loaded), loaded) == (type(value), value)


def test_keys_stay_text_whatever_they_look_like() -> None:
    tree = load("{steps: 1, regions: {no: {workers: 1}, 1: {workers: 2}, null: {workers: 3}}}")
    assert list(tree.regions) == ["no", "1", "null"]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 1\nsteps: 2", ["line 2", "'steps' twice", "line 1"]),
        ("regions: {a: {workers: 1},\n a: {workers: 2}}", ["line 2", "'a' twice"]),
        ("steps: &x 1", ["line 1", "anchors"]),
        ("a: &x [1]\nb: *x", ["anchors"]),
        ("steps: !!python/object/apply:os.system ['true']", ["tag", "os.system"]),
        ("steps: !!int 3", ["tag"]),
        ("lr: .nan", ["line 1", ".nan", "finite"]),
        ("lr: -.inf", ["finite"]),
        ("lr: 1e999", ["finite"]),
        ("steps: " + "9" * 5000, ["digits"]),
        ("steps: 1\n---\nsteps: 2", ["second document"]),
        ("[" * 100_000, ["nesting"]),
        ("{a: " * 1000, ["nesting"]),
        ("lr: [" + "1," * 60_000 + "]", ["more than 50000 values"]),
        ("? [a, b]\n: 1", ["key"]),
        ("? \n: 1", ["empty key"]),
        ("- 1", ["mapping"]),
        ("text", ["mapping"]),
        ("a: b: c", ["line 1", "not valid YAML"]),
        ("a: 'x", ["not valid YAML"]),
        ("a: [\n  - x\n", ["line 2", "inside brackets that are still open"]),
        ("a: %x", ["not valid YAML"]),
        ("a: \0", ["not valid YAML"]),
        (r'a: "\UFFFFFFFF"', ["not valid YAML"]),
        (r'a: "\ud800"', ["surrogate"]),
    ],
)
def test_dangerous_or_broken_text_is_refused_with_the_place(text: str, words: list[str]) -> None:
    message = complaint(text)
    assert message.startswith("[CONFIG_INVALID] job.yaml")
    for word in words:
        assert word in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    big, latin = tmp_path / "big.yaml", tmp_path / "latin.yaml"
    big.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    latin.write_bytes(b"note: \xff\xfe")
    for path in (tmp_path / "absent.yaml", tmp_path, big, latin, Path("\0")):
        with pytest.raises(ConfigError, match=r"CONFIG_INVALID"):
            load_tree(path, [], Root)


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match=r"the file is empty; it needs at least the keys"):
        load_tree(path, [], Root)


# ------------------------------------------------------------------ complaints


class Items(StrictModel):
    one: tuple[Region, ...] = Field(min_length=1)
    two: tuple[Region, ...] = Field((), min_length=2)


def test_wrong_items_do_not_make_a_list_too_short() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text("one: [{workrs: 1}, {workrs: 2}]\ntwo: [{workrs: 1}]\n", [], Items, "job.yaml")
    message = str(caught.value)
    assert "4 problems" in message
    assert re.findall(r"^    (\S+) \(line \d\): (\S+)", message, flags=re.M) == [
        ("one.0.workrs", "unknown"),
        ("one.1.workrs", "unknown"),
        ("two.0.workrs", "unknown"),
        ("two", "got"),
    ]


def test_one_error_lists_every_problem_with_key_place_value_and_expectation() -> None:
    message = complaint(
        "step: 3\nlr: x\nstrategy: {kind: dilco}\n"
        "regions: {eu: {workrs: 1}, us: {workers: 1.5}}\n"
        "strategies: [{kind: diloco, outer_l: 3}, {kind: asgd, interval: 0}, {}, 3]\n"
        "maybe: {kind: asgd, intervall: 1}\nmixed: [1]\npair: [1, 2]\nzzz: 1\n"
    )
    for line in (
        'lr (line 2): got "x", expected a number',
        'strategy.kind (line 3): got "dilco", expected one of asgd, diloco; did you mean diloco?',
        "regions.eu.workrs (line 4): unknown key; did you mean workers?",
        "regions.us.workers (line 4): got 1.5, expected a whole number",
        "strategies.0.outer_l (line 5): unknown key; did you mean outer_lr?",
        "strategies.1.interval (line 5): got 0, expected a whole number of at least 1",
        "strategies.2 (line 5): the key kind is missing; it is one of asgd, diloco",
        "strategies.3 (line 5): got 3, expected a section whose kind is one of asgd, diloco",
        "maybe.intervall (line 6): unknown key; did you mean interval?",
        "mixed (line 7): got [1], expected a whole number or text or null",
        'pair.1 (line 8): got 2, expected text; did you mean "2"?',
        "step (line 1): unknown key; did you mean steps?",
        "zzz (line 9): unknown key; valid are: steps, lr,",
    ):
        assert f"    {line}" in message
    assert "steps: missing" not in message, "it is there, misspelt"
    assert "    regions.eu.workers (line 4): missing" not in message
    assert "13 problems" in message


def test_a_key_of_another_section_is_found() -> None:
    assert "did you mean strategy.outer_lr, a key of diloco only?" in complaint(
        "steps: 1\nouter_lr: 1.0"
    )


def test_rules_between_keys_are_reported_at_their_section() -> None:
    message = complaint("{steps: 1, regions: {eu: {workers: 1, note: bad}}}")
    assert "regions.eu (line 1)" in message
    assert "note must not be bad" in message


def test_values_that_may_be_secret_are_not_repeated() -> None:
    message = complaint("{steps: 1, regions: {eu: {workers: 1, secret_token: hunter2}}}")
    assert "regions.eu.secret_token" in message
    assert "hunter2" not in message


def test_long_values_are_shortened() -> None:
    assert len(complaint("steps: " + "x" * 5000)) < 400


# ------------------------------------------------------------------ text, digest, difference


def test_dump_is_complete_and_loads_unchanged() -> None:
    tree = load("{steps: 1, strategy: {kind: diloco}, regions: {'1': {workers: 2, note: 'no'}}}")
    text = dump_yaml(tree)
    assert "outer_lr: 0.7" in text
    assert load(text) == tree


def test_equal_subtrees_are_written_out_twice() -> None:
    region = Region(workers=1)
    tree = Root(steps=1, regions={"a": region, "b": region})
    assert load(dump_yaml(tree)) == tree


def test_digest_counts_defaults_and_not_key_order() -> None:
    assert digest(load("steps: 1")) == digest(load("{lr: 0.1, steps: 1}"))
    assert digest(load("steps: 1")) != digest(load("steps: 2"))
    assert len(digest(load("steps: 1"))) == 64


def test_diff_names_the_keys_that_differ() -> None:
    old = load("{steps: 1, regions: {a: {workers: 1}}, strategies: [{kind: asgd}]}")
    new = load("{steps: 2, regions: {a.b: {workers: 1}}, strategies: [{kind: asgd, interval: 2}]}")
    assert diff(old, old) == []
    assert diff(old, new) == [
        "steps: 1 -> 2",
        "regions.a.workers: 1 -> (absent)",
        "regions.a.note: null -> (absent)",
        "regions.a.secret_token: null -> (absent)",
        "strategies.0.interval: 1 -> 2",
        'regions."a.b".workers: (absent) -> 1',
        'regions."a.b".note: (absent) -> null',
        'regions."a.b".secret_token: (absent) -> null',
    ]


def test_diff_tells_true_from_one() -> None:
    class Anything(StrictModel):
        x: Any

    assert diff(Anything(x=1), Anything(x=True)) == ["x: 1 -> true"]


# ------------------------------------------------------------------ help


def test_describe_lists_every_key_of_every_kind() -> None:
    lines = describe(Root).splitlines()
    for line in (
        "steps: int (>= 1), required",
        "lr: float, default: 0.1",
        "strategy: section, default: its own defaults",
        "strategy(kind=asgd).interval: int (>= 1), default: 1",
        "    Steps between two updates.",
        "strategy(kind=diloco).outer_lr: float (> 0), default: 0.7",
        "regions: mapping of section, default: {}",
        "regions.<name>.workers: int, required",
        "strategies.<n>(kind=diloco).outer_lr: float (> 0), default: 0.7",
        "mixed: int | str | null, default: null",
    ):
        assert line in lines


def test_json_schema_knows_the_keys() -> None:
    assert set(json_schema(Root)["properties"]) == set(Root.model_fields)
