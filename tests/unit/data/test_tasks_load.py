from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from geo_ray.base.errors import TaskLoadError
from geo_ray.data.tasks.checked_calls import describe
from geo_ray.data.tasks.load import BUILT_IN, Scalar, TaskConfig, load_task

TASK = '''
"""A user's task."""
from __future__ import annotations

from dataclasses import dataclass
from torch import nn
import geo_ray


@dataclass
class Helper:
    value: int


class Small:
    class Options(geo_ray.Options):
        width: int = 3
        rate: float = 0.5
        directory: str | None = None

    columns = {"x": "float32[2]", "label": "int64"}
    label_column = "label"

    def __init__(self, options: Options) -> None:
        self.options = options

    def model(self, seed):
        return nn.Linear(2, self.options.width)

    def collate(self, columns, device):
        return columns

    def loss(self, model, batch):
        return model(batch)

    def evaluate(self, model, batch):
        return {}

    def metrics(self, stats):
        return {}
'''


def load(use: str, base_dir: Path, **options: Scalar) -> object:
    return load_task(TaskConfig(use=use, options=options), base_dir)


def refused(use: str, base_dir: Path, **options: Scalar) -> TaskLoadError:
    with pytest.raises(TaskLoadError) as caught:
        load(use, base_dir, **options)
    return caught.value


def write(directory: Path, text: str, name: str = "mine.py") -> str:
    (directory / name).write_text(text)
    return f"{name}:Small"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_tasks_load_by_short_name(name: str, tmp_path: Path) -> None:
    description = describe(load_task(TaskConfig(use=name), tmp_path))
    assert description.parameters > 1000
    assert description.parameter_bytes == 4 * description.parameters
    assert description.self_contained


def test_a_file_is_found_from_the_base_directory(tmp_path: Path) -> None:
    use = write(tmp_path, TASK)
    task = load_task(TaskConfig(use=use, options={"width": 5}), tmp_path)
    assert describe(task).parameters == 15
    assert describe(task).name == "Small"
    assert not describe(task).self_contained
    assert load_task(TaskConfig(use=f"{tmp_path / 'mine.py'}:Small"), Path("/"))


def test_a_file_leaves_no_bytecode_and_no_path_behind(tmp_path: Path) -> None:
    path_before = list(sys.path)
    load(write(tmp_path, TASK), tmp_path)
    assert sys.path == path_before
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_the_same_file_is_run_once_and_an_edited_one_again(tmp_path: Path) -> None:
    first = load(write(tmp_path, TASK), tmp_path)
    assert type(load("mine.py:Small", tmp_path)) is type(first)
    # The same length within the same second: bytecode caches would serve the old one.
    write(tmp_path, TASK.replace("width: int = 3", "width: int = 4"))
    task = load_task(TaskConfig(use="mine.py:Small"), tmp_path)
    assert describe(task).parameters == 12


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, TASK)
    first, second = load("a/mine.py:Small", tmp_path), load("b/mine.py:Small", tmp_path)
    assert type(first).__module__ != type(second).__module__


def test_a_file_knows_where_it_lies(tmp_path: Path) -> None:
    use = write(tmp_path, TASK + "\n\nHERE = __file__\n")
    module = sys.modules[type(load(use, tmp_path)).__module__]
    assert vars(module)["HERE"] == str(tmp_path / "mine.py")


def test_a_class_of_an_importable_module_loads(tmp_path: Path) -> None:
    assert load("geo_ray.data.tasks.digits:Digits", tmp_path, width=4)


@pytest.mark.parametrize(
    ("use", "parts"),
    [
        ("digit", ["'digit'", "did you mean 'digits'"]),
        ("nothing-like-it", ["bytelm", "ctr", "digits", "images"]),
        ("mine.py", ["'mine.py'", "mine.py:Class"]),
        ("absent.py:Small", ["absent.py", "does not exist"]),
        ("no_such_package.tasks:Small", ["'no_such_package'"]),
        ("geo_ray.data.tasks.nothing:Small", ["'geo_ray.data.tasks.nothing'"]),
        ("geo_ray.data.tasks.digits:Digit", ["'Digit'", "did you mean 'Digits'"]),
        ("geo_ray.data.tasks.digits:seeded", ["is not a class"]),
        ("..:Small", ["'..:Small'"]),
        (":", ["':'"]),
    ],
)
def test_names_that_lead_nowhere(use: str, parts: list[str], tmp_path: Path) -> None:
    text = str(refused(use, tmp_path))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("a = 1\nb = undefined\n", ["mine.py:2", "NameError", "undefined"]),
        ("a = 1\n\ndef broken(:\n", ["mine.py:3", "SyntaxError"]),
        ("import sys\nsys.exit(3)\n", ["mine.py:2", "SystemExit"]),
        ("import no_such_package\n", ["mine.py:1", "no_such_package"]),
        ("def f():\n    return {}['key']\n\nf()\n", ["mine.py:2", "KeyError"]),
        ("import json\n\njson.loads('{')\n", ["mine.py:3", "JSONDecodeError"]),
        ("\0", ["mine.py", "null bytes"]),
    ],
)
def test_a_file_that_raises_names_the_line(source: str, parts: list[str], tmp_path: Path) -> None:
    modules = set(sys.modules)
    text = str(refused(write(tmp_path, source), tmp_path))
    assert all(part in text for part in parts), text
    assert not any(name.startswith("geo_ray_user_") for name in set(sys.modules) - modules)


def test_an_interrupt_is_not_taken_for_a_bad_file(tmp_path: Path) -> None:
    use = write(tmp_path, "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load(use, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("def evaluate(", "def evaluation(", ["has no evaluate(model, batch)"]),
        ("def loss(self, model, batch)", "def loss(self, model)", ["loss(model, batch)"]),
        ("def metrics(", "dataset = 3\n    def metrics(", ["dataset is not a method"]),
        ('    label_column = "label"\n', "", ["has no label_column"]),
        ('label_column = "label"', 'label_column = "lable"', ["'lable'", "label"]),
        ('label_column = "label"', 'label_column = "x"', ["'x'", "one integer per row"]),
        ('"float32[2]"', '"float[2]"', ["'x'", "'float[2]'"]),
        ('"float32[2]"', "2", ["columns must map text to text"]),
        ('{"x": "float32[2]", "label": "int64"}', "{}", ["non-empty mapping"]),
        (
            "class Options(geo_ray.Options)",
            "class Settings(geo_ray.Options)",
            ["no nested class Options"],
        ),
        ("class Options(geo_ray.Options)", "class Options", ["no nested class Options"]),
        ("self.options = options", "1 / 0", ["mine.py:25", "ZeroDivisionError"]),
        ("self, options: Options", "self", ["mine.py", "TypeError"]),
    ],
)
def test_a_task_that_breaks_the_protocol(
    old: str, new: str, parts: list[str], tmp_path: Path
) -> None:
    assert old in TASK
    text = str(refused(write(tmp_path, TASK.replace(old, new)), tmp_path))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"widht": 4}, ["task.options.widht: unknown key; did you mean width?"]),
        ({"zzz": 4}, ["task.options.zzz: unknown key; valid are: width, rate, directory"]),
        ({"width": "wide"}, ['task.options.width: got "wide", expected a whole number\n']),
        ({"width": 1.5}, ["task.options.width: got 1.5, expected a whole number\n"]),
        ({"width": True}, ["task.options.width: got true, expected a whole number\n"]),
        ({"width": "4"}, ["a whole number; did you mean 4?"]),
        ({"widht": 4, "rate": "x"}, ["2 invalid options", "options.widht:", "options.rate:"]),
    ],
)
def test_options_that_do_not_fit(
    options: dict[str, Scalar], parts: list[str], tmp_path: Path
) -> None:
    error = refused(write(tmp_path, TASK), tmp_path, **options)
    assert all(part in str(error) for part in parts), str(error)
    assert error.fix == (
        "mine.py:Small has these options:\n    width: int, default: 3\n"
        "    rate: float, default: 0.5\n    directory: str | null, default: null"
    )


def test_a_task_without_options_says_so(tmp_path: Path) -> None:
    none = "        pass\n"
    start, end = TASK.index("        width: int"), TASK.index("\n    columns")
    bare = TASK[:start] + none + TASK[end:]
    error = refused(write(tmp_path, bare), tmp_path, width=3)
    assert "task.options.width: unknown key; no key is valid here" in str(error)
    assert error.fix == "Remove them: mine.py:Small has no options."


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("import no_such_package\n", "Install no_such_package here and on every node"),
        ("def broken(:\n", "not valid Python"),
        ("import sys\nsys.exit(3)\n", "__main__"),
        ("{}['key']\n", "importing the file in a Python shell"),
    ],
)
def test_only_a_file_that_does_not_import_is_to_be_imported_by_hand(
    source: str, fix: str, tmp_path: Path
) -> None:
    assert fix in refused(write(tmp_path, source), tmp_path).fix
    others = [
        refused("digits", tmp_path, widht=3),
        refused("digit", tmp_path),
        refused(write(tmp_path, TASK.replace("def loss(", "def lost(")), tmp_path),
        refused(write(tmp_path, TASK).replace("Small", "Smal"), tmp_path),
        refused(write(tmp_path, TASK.replace("self.options = options", "1 / 0")), tmp_path),
    ]
    for error in others:
        assert "import" not in error.fix.lower(), error


def test_options_keep_their_types(tmp_path: Path) -> None:
    task = load(write(tmp_path, TASK), tmp_path, width=2, rate=1, directory="here")
    assert vars(task)["options"].model_dump() == {"width": 2, "rate": 1.0, "directory": "here"}


def test_the_configuration_is_strict() -> None:
    with pytest.raises(ValidationError):
        TaskConfig.model_validate_json('{"use": "digits", "option": {}}')
    with pytest.raises(ValidationError):
        TaskConfig.model_validate_json('{"use": "digits", "options": {"a": [1]}}')
    cfg = TaskConfig.model_validate_json(
        '{"use": "x", "options": {"a": 1, "b": true, "c": 1.0, "d": null, "e": "1"}}'
    )
    assert [type(value) for value in cfg.options.values()] == [int, bool, float, type(None), str]


def test_a_built_in_option_is_checked_by_name(tmp_path: Path) -> None:
    assert "one of 0.1M, 1M, 10M, 50M" in str(refused("bytelm", tmp_path, size="5M"))
    assert "'heads'" in str(refused("bytelm", tmp_path, heads=7))
