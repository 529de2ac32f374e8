"""No received byte is ever executed, the library prints nothing, and no thread waits for ever."""

from __future__ import annotations

import ast
from typing import Any

import pytest

UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "imp"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.hub.load",
    "torch.distributed.checkpoint.FileSystemReader",  # metadata are pickled
    "torch.distributed.checkpoint.filesystem.FileSystemReader",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "logging.basicConfig",
}

SHARED_GENERATORS = {
    "torch.default_generator",
    "torch.get_rng_state",
    "torch.manual_seed",
    "torch.random.fork_rng",
    "torch.random.manual_seed",
    "torch.seed",
    "torch.set_rng_state",
}
ALLOWED = {("geo_ray.runs.model_export", "torch.save")}  # writes tensors alone, and reads nothing


# Modules of a driver's process that start threads by themselves, and why they may.
STARTS_THREADS = {
    "geo_ray.ray_cluster.calls": "joins all that it starts before Ray is shut down",
    "geo_ray.ray_cluster.connect": "joined by its context manager",
    "geo_ray.runtime.run_context": "writes models, and is joined by `EvalNotes.end`",
    "geo_ray.runtime.checkpoints": "writes checkpoints; does not call Ray",
    "geo_ray.runtime.replanning": "plans and writes a file; does not call Ray",
    "geo_ray.runtime.run_actor": "an actor, whose process never shuts Ray down",
    "geo_ray.runtime.supervisor": "an actor, whose process never shuts Ray down",
}
OF_A_DRIVER = tuple(
    f"geo_ray.{each}"
    for each in (
        *("ray_cluster.", "runtime.actor_group", "runtime.attach", "runtime.checkpoint"),
        *("runtime.main", "runtime.run_", "runtime.supervisor"),
        *("runtime.controller", "runtime.joining", "runtime.launcher", "runtime.member"),
        *("runtime.policies", "runtime.process_watch", "runtime.replanning"),
    )
)
THREADS = {"threading.Thread", "threading.Timer", "ThreadPoolExecutor", "Workers"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def unsafe_uses(file: Any) -> list[str]:
    found = [(line, name) for line, name in file.imports() if UNSAFE_MODULES & set(name.split("."))]
    found += [(line, name) for line, name in file.imports() if name in UNSAFE_CALLS]
    for node in file.nodes:
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in UNSAFE_CALLS or UNSAFE_MODULES & set(name.split(".")):
                found.append((node.lineno, name))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in UNSAFE_BUILTINS:
                found.append((node.lineno, node.id))
        elif isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "shell"}:
            found += [(node.value.lineno, node.arg)] if ast.unparse(node.value) != "False" else []
    found = [(line, name) for line, name in found if (file.name, name) not in ALLOWED]
    return [f"{file.name}:{line} uses {name}" for line, name in found]


def prints(file: Any) -> list[str]:
    return [
        f"{file.name}:{node.lineno} prints"
        for node in file.nodes
        if isinstance(node, ast.Call)
        and dotted(node.func) in {"print", "sys.stdout.write", "sys.stderr.write"}
    ]


def test_nothing_that_executes_received_bytes(library: list[Any]) -> None:
    assert not [text for file in library for text in unsafe_uses(file)]


def is_program(file: Any) -> bool:
    """What a person or a shell starts: the command line, and ``python -m`` of a package."""
    return file.package == "cli" or 'if __name__ == "__main__":' in file.text.splitlines()


def test_only_programs_print(library: list[Any]) -> None:
    assert not [text for file in library if not is_program(file) for text in prints(file)]


def threads_started(file: Any) -> list[str]:
    if not file.name.startswith(OF_A_DRIVER) or file.name in STARTS_THREADS:
        return []
    return [
        f"{file.name}:{node.lineno} starts a thread; let `RayThreads` start it"
        for node in file.nodes
        if isinstance(node, ast.Call) and dotted(node.func) in THREADS
    ]


def test_threads_of_a_driver_end_before_it_disconnects_from_ray(
    library: list[Any], source_file: Any
) -> None:
    assert not [text for file in library for text in threads_started(file)]
    assert {file.name for file in library} >= STARTS_THREADS.keys()
    started = source_file.parse("geo_ray.runtime.run_x", "threading.Thread(target=f).start()")
    assert len(threads_started(started)) == 1


def shared_generator_uses(file: Any) -> list[str]:
    """Where the generators that all threads share are read or set, but by `base/random_state.py`.

    Checks of users' own code (`testing`) run alone.
    """
    if file.name == "geo_ray.base.random_state" or file.package == "testing":
        return []
    return [
        f"{file.name}:{node.lineno} uses {dotted(node)}"
        for node in file.nodes
        if isinstance(node, ast.Attribute) and dotted(node) in SHARED_GENERATORS
    ]


def test_one_thread_at_a_time_reads_or_sets_shared_generators(
    library: list[Any], source_file: Any
) -> None:
    assert not [text for file in library for text in shared_generator_uses(file)]
    text = "with torch.random.fork_rng(devices=[]): torch.manual_seed(1)"
    assert len(shared_generator_uses(source_file.parse("geo_ray.x", text))) == 2


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("import pickle", True),
        ("from ray import cloudpickle", True),
        ("import ray\nray.cloudpickle.dumps(1)", True),
        ("import torch\ntorch.load('x')", True),
        ("from torch import load", True),
        ("from torch.distributed.checkpoint import FileSystemReader", True),
        ("from torch.distributed.checkpoint import StorageReader", False),
        ("import yaml\nyaml.load(x, Loader=yaml.SafeLoader)", True),
        ("import yaml\nyaml.safe_load(x)", False),
        ("eval('1')", True),
        ("f = exec", True),
        ("eval: dict[str, float] = {}", False),
        ("model.eval()", False),
        ("re.compile('x')", False),
        ("np.load(x, allow_pickle=True)", True),
        ("np.load(x, allow_pickle=False)", False),
        ("subprocess.run(x, shell=True)", True),
    ],
)
def test_the_rule_bites(source_file: Any, text: str, refused: bool) -> None:
    assert bool(unsafe_uses(source_file.parse("geo_ray.x", text))) == refused
