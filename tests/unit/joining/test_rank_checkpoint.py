"""Checkpoints of ranks in one process: what is stored, what is refused, what damage is found."""

from __future__ import annotations

import json
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.tensor import Partial, Replicate, Shard

from geo_ray.base.canonical import canonical_json
from geo_ray.base.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointMissingError,
    GeoRayError,
)
from geo_ray.joining.checkpoint import (
    CheckedLoadPlanner,
    SafetensorsReader,
    SafetensorsWriter,
    commit,
    load,
    write_part,
)
from geo_ray.joining.checkpoint_manifest import (
    PartRecord,
    combine,
    decode_value,
    encode_value,
    read_manifest,
)
from geo_ray.storage.manifest import seal
from geo_ray.storage.parts import MAX_TENSORS
from tests.support.rank_checkpoint_support import TiedModel, as_rank, oracle, sharded

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    commit(folder, [write_part(state, folder, 0, 1, **options)])


class Loop:
    """A training loop: a model, an optimizer and a schedule."""

    def __init__(self, optimizer: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = TiedModel(dtype)
        params = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
            if optimizer == "sgd"
            else torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.95))
        )
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], 0.5)

    def step(self, number: int) -> None:
        for index in range(number):
            rows = torch.arange(5) % (index + 2)
            nn.functional.cross_entropy(self.model(rows).float(), rows).backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])


def save_with_torch(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=SafetensorsWriter(folder))


def load_with_torch(state: dict[str, Any], folder: Path) -> None:
    dcp.load(state, storage_reader=SafetensorsReader(folder), planner=CheckedLoadPlanner())


# ------------------------------------------------------------------ round trip


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saving", [save, save_with_torch])
@pytest.mark.parametrize("loading", [load, load_with_torch])
def test_a_resumed_loop_continues_bit_for_bit(
    tmp_path: Path,
    optimizer: str,
    dtype: torch.dtype,
    saving: Callable[[dict[str, Any], Path], None],
    loading: Callable[[dict[str, Any], Path], None],
) -> None:
    torch.manual_seed(1)
    first = Loop(optimizer, dtype)
    first.step(3)
    saving(first.state(), tmp_path / "new")
    torch.manual_seed(2)
    second = Loop(optimizer, dtype)
    state = second.state()
    loading(state, tmp_path / "new")
    second.restore(state)
    assert second.schedule.state_dict() == first.schedule.state_dict()
    first.step(4)
    second.step(4)
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])


def test_an_independent_reader_finds_everything(tmp_path: Path) -> None:
    loop = Loop("adamw", torch.bfloat16)
    loop.step(2)
    state = loop.state()
    save({**state, "epoch": 3, "seen": {"rows": [1, 2]}}, tmp_path)
    found = oracle(tmp_path)
    assert found["epoch"] == 3
    assert found["seen.rows"] == [1, 2]
    assert found["optimizer.param_groups.0.betas"] == (0.8, 0.95)
    assert found["schedule.milestones.5"] == 1
    for name, value in state["model"].items():
        assert torch.equal(found[f"model.{name}"], value)
    for name, moments in state["optimizer"]["state"].items():
        for kind, value in moments.items():
            assert torch.equal(found[f"optimizer.state.{name}.{kind}"], value)


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    state = {"model": TiedModel().state_dict()}
    save(state, tmp_path / "a")
    save_with_torch(state, tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b"):
        tensors = read_manifest(folder).tensors
        tied = tensors["model.embedding.weight"], tensors["model.output.weight"]
        assert tied[0].chunks == tied[1].chunks
        elements = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        assert elements < (7 * 4 + 4 * 4 + 4) * 4 + 1000


def test_equal_memory_of_another_shape_is_another_tensor(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    square = torch.arange(4.0).reshape(2, 2)
    state = {"a": base, "b": base.reshape(2, 3), "c": base[:3], "d": base.reshape(2, 3).T}
    state |= {"e": square, "f": square.T, "g": square.view(torch.int32)}
    save(state, tmp_path)
    back = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    load(back, tmp_path)
    assert all(torch.equal(back[key], value) for key, value in state.items())


def test_equal_memory_elsewhere_in_a_tensor_is_another_tensor(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    records = []
    for rank in range(2):
        with as_rank(rank, 2):
            shard = sharded(whole, (2,), [Shard(0)])
            state = {"part": shard.to_local(), "w": shard}
            records.append(write_part(state, tmp_path, rank, 2))
    commit(tmp_path, records)
    found = oracle(tmp_path)
    assert (found["part"].tolist(), found["w"].tolist()) == ([0, 1], [0, 1, 2, 3])


def test_empty_and_scalar_tensors_come_back(tmp_path: Path) -> None:
    state = {"empty": torch.zeros(0, 3), "step": torch.tensor(7.0), "flag": torch.tensor(True)}
    save(state, tmp_path)
    back = {
        "empty": torch.ones(0, 3),
        "step": torch.tensor(0.0),
        "flag": torch.tensor(False),
    }
    load(back, tmp_path)
    assert (back["empty"].shape, back["step"].item(), back["flag"].item()) == ((0, 3), 7.0, True)


def test_values_are_loaded_into_the_places_they_had(tmp_path: Path) -> None:
    state = {
        "numbers": {3: {"a": 1.5}, "text": "ü"},
        "list": [{"x": 1}, {"x": torch.ones(2)}],
        "pair": (1, [2, None], {"k": (True,)}),
        "limits": [float("inf"), float("nan"), -0.0],
        "ordered": OrderedDict(z=1, a=2),
    }
    save(state, tmp_path)
    back: dict[str, Any] = {
        "numbers": {3: {"a": 0.0}, "text": ""},
        "list": [{"x": 0}, {"x": torch.zeros(2)}],
        "pair": (),
        "limits": [],
        "ordered": OrderedDict(z=0, a=0),
    }
    load(back, tmp_path)
    assert back["numbers"] == {3: {"a": 1.5}, "text": "ü"}
    assert back["list"][0] == {"x": 1}
    assert torch.equal(back["list"][1]["x"], torch.ones(2))
    assert back["pair"] == state["pair"]
    assert str(back["limits"]) == "[inf, nan, -0.0]"
    assert back["ordered"] == OrderedDict(z=1, a=2)


def test_objects_with_a_state_are_asked_for_it_and_get_it_back(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    save({"model": first}, tmp_path)
    state: dict[str, Any] = {"model": second}
    load(state, tmp_path)
    assert state["model"] is second
    assert torch.equal(first.weight, second.weight)


def test_an_optimizer_with_numbered_parameters_comes_back(tmp_path: Path) -> None:
    first, second = (torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=lr) for lr in (0.1, 0.2))
    for optimizer in (first, second):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.full_like(param, optimizer.param_groups[0]["lr"])
        optimizer.step()
    save({"optimizer": first}, tmp_path)
    load({"optimizer": second}, tmp_path)
    assert str(second.state_dict()) == str(first.state_dict())


def test_a_whole_state_is_rebuilt_from_the_checkpoint_alone(tmp_path: Path) -> None:
    loop = Loop("adamw")
    loop.step(2)
    state = {**loop.state(), "list": [{"x": 1}, {"y": [2, (3,)]}]}
    save(state, tmp_path)
    found = _load_state_dict_from_keys(storage_reader=SafetensorsReader(tmp_path))
    found["schedule"]["milestones"] = Counter({2: 1, 5: 1})  # torch turns keys into text
    assert str(by_key(found)) == str(by_key(state))


def by_key(value: Any) -> Any:
    """A state with all keys in order."""
    if isinstance(value, list):
        return [by_key(each) for each in value]
    if isinstance(value, dict):
        return {key: by_key(value[key]) for key in sorted(value)}
    return value


def test_a_folder_may_be_named_in_the_call(tmp_path: Path) -> None:
    writer, reader = SafetensorsWriter("nowhere"), SafetensorsReader("nowhere")
    for number in range(2):
        folder = tmp_path / str(number)
        dcp.save({"n": number}, checkpoint_id=folder, storage_writer=writer)
        state = {"n": None}
        dcp.load(state, checkpoint_id=folder, storage_reader=reader)
        assert state == {"n": number}
    assert SafetensorsWriter.validate_checkpoint_id("s3://bucket/prefix")
    assert not SafetensorsReader.validate_checkpoint_id("gs://bucket/prefix")


def test_plans_may_be_cached(tmp_path: Path) -> None:
    for number in range(3):
        dcp.save(
            {"t": torch.full((2,), float(number))},
            storage_writer=SafetensorsWriter(tmp_path / str(number)),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        assert oracle(tmp_path / str(number))["t"].tolist() == [number, number]


def test_a_part_of_the_state_is_loaded_on_request(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": torch.ones(3), "n": 1}, tmp_path)
    state = {"a": torch.zeros(2)}
    load(state, tmp_path, partial=True)
    assert state["a"].tolist() == [1, 1]


def test_a_load_does_not_change_how_other_threads_name_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's planner does, in all threads, if the checkpoint has a key that the state lacks."""
    versions: list[object] = []

    class Watched(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            versions.append((name, value))
            super().__setattr__(name, value)

    watched = Watched("_version")
    watched._derived_version = None
    versions.clear()
    monkeypatch.setattr(default_planner, "_version", watched)
    save({"a": torch.ones(2), "groups": [{"rate": torch.ones(1), "n": 1}]}, tmp_path)
    load({"a": torch.zeros(2)}, tmp_path, partial=True)
    assert not versions
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"a": torch.zeros(2)}, storage_reader=SafetensorsReader(tmp_path), planner=planner)
    assert versions[-1] == ("_derived_version", None)  # what must not happen here


def test_files_are_bounded_in_bytes(tmp_path: Path) -> None:
    state = {f"t{n}": torch.full((10,), float(n)) for n in range(7)}
    save(state, tmp_path, file_bytes=100)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert oracle(tmp_path).keys() == state.keys()
    back = {key: torch.zeros(10) for key in state}
    load(back, tmp_path)
    assert all(torch.equal(back[key], value) for key, value in state.items())


def test_files_are_bounded_in_tensors(tmp_path: Path) -> None:
    save({f"t{n}": torch.tensor(n) for n in range(MAX_TENSORS + 1)}, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_any_key_can_be_stored(tmp_path: Path) -> None:
    state = {"__metadata__": torch.ones(1), "x" * 300: torch.zeros(2), "ü.\n'": torch.ones(3)}
    save(state, tmp_path)
    back = {key: torch.full_like(value, 5) for key, value in state.items()}
    load(back, tmp_path)
    assert all(torch.equal(back[key], value) for key, value in state.items())
    assert oracle(tmp_path).keys() == state.keys()


def test_a_key_may_look_like_that_of_a_chunk(tmp_path: Path) -> None:
    records = []
    for rank in range(2):
        with as_rank(rank, 2):
            state = {
                "w": sharded(torch.arange(4.0), (2,), [Shard(0)]),
                "w@0": sharded(torch.full((2,), 7.0), (2,), [Replicate()]),
            }
            records.append(write_part(state, tmp_path, rank, 2))
    commit(tmp_path, records)
    found = oracle(tmp_path)
    assert (found["w"].tolist(), found["w@0"].tolist()) == ([0, 1, 2, 3], [7, 7])


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    state = {"a": torch.arange(5), "n": [1, {"k": 2}]}
    for name in ("a", "b"):
        save(state, tmp_path / name)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]


def test_a_record_survives_a_message(tmp_path: Path) -> None:
    record = write_part({"a": torch.ones(2), "n": (1.5, None)}, tmp_path, 0, 1)
    assert PartRecord.from_json(json.dumps(record.to_json())) == record
    with pytest.raises(CheckpointError, match="not the record of a part"):
        PartRecord.from_json("{}")


# ------------------------------------------------------------------ refusals


class Own(float):
    """A number with an attribute that would be lost."""


class OwnList(list[int]):
    """A list with an attribute that would be lost."""


@pytest.mark.parametrize(
    ("value", "what", "remedy"),
    [
        (b"abc", "type bytes", "frombuffer"),
        (np.float64(1.5), "type numpy.float64", "value.item()"),
        (np.zeros(2), "type numpy.ndarray", "as_tensor"),
        ({3}, "type set", "sorted"),
        (torch.float32, "type torch.dtype", "str(value)"),
        (len, "builtin_function_or_method", "leave it out"),
        ((nn.Parameter(torch.ones(1)),), "type torch.nn.parameter.Parameter", "plain tensors"),
        (Own(1.5), "Own", "float(value)"),
        (OwnList([1]), "OwnList", "list(value)"),
        ((OrderedDict(a=1),), "type collections.OrderedDict", "dict(value)"),
        (torch.Size([2]), "type torch.Size", "tuple(value)"),
        (object(), "type object", "state_dict"),
        ("\ud800", "not Unicode", "Save"),
    ],
)
def test_a_value_of_another_type_is_refused_by_key(
    tmp_path: Path, value: Any, what: str, remedy: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_part({"loader": {"inner": value}}, tmp_path, 0, 1)
    assert caught.value.message.startswith("'loader.inner': ")
    assert what in caught.value.message
    assert remedy in caught.value.fix
    with pytest.raises(CheckpointException) as failed:
        save_with_torch({"loader": {"inner": value}}, tmp_path)
    assert isinstance(failed.value.failures[0][0], CheckpointError)


def test_tensors_in_tuples(tmp_path: Path) -> None:
    """Planners of torch see one value, so that the number and shapes of its tensors may change."""
    saved = ({"a": torch.arange(6).view(2, 3).t(), "n": 3}, [torch.empty(0, 2), (torch.ones(()),)])
    state = {"t": torch.zeros(2), "inside": {"key": saved}}
    save(state, tmp_path / "a")
    save_with_torch(state, tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b"):
        for read in (load, load_with_torch):
            back: dict[str, Any] = {"t": torch.ones(2), "inside": {"key": ()}}
            read(back, folder)
            torch.testing.assert_close(back, state, rtol=0, atol=0)
            assert back["inside"]["key"][0]["a"].dtype == torch.int64


def test_damage_of_a_tensor_in_a_tuple_is_noticed(tmp_path: Path) -> None:
    save({"key": (torch.ones(3),)}, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointCorruptError, match=path.name):
        load({"key": ()}, tmp_path)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="'k': the value contains itself"):
        encode_value("k", value)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ((torch.ones(2, dtype=torch.complex64),), "torch.complex64"),
        (torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(2, 2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "meta device"),
    ],
)
def test_a_tensor_of_another_kind_is_refused_by_key(
    tmp_path: Path, tensor: Tensor, what: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"'m\.t': .*{what}"):
        write_part({"m": {"t": tensor}}, tmp_path, 0, 1)


def test_a_sum_that_is_not_computed_yet_is_refused(tmp_path: Path) -> None:
    with as_rank(0, 2):
        tensor = sharded(torch.ones(2), (2,), [Replicate()])
        partial = type(tensor).from_local(
            torch.ones(2), tensor.device_mesh, [Partial()], run_check=False
        )
        with pytest.raises(CheckpointError, match=r"'g': .*Partial") as caught:
            write_part({"g": partial}, tmp_path, 0, 2)
        assert "Redistribute" in caught.value.fix


def test_two_values_with_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"same key.*a\.b"):
        write_part({"a.b": 1, "a": {"b": 2}}, tmp_path, 0, 1)


def test_what_a_planner_returns_is_stored(tmp_path: Path) -> None:
    class Halving(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            found = super().resolve_data(write_item)
            return found.half() if isinstance(found, Tensor) else found

    dcp.save(
        {"t": torch.ones(3), "n": 1},
        storage_writer=SafetensorsWriter(tmp_path),
        planner=Halving(),
    )
    assert oracle(tmp_path)["t"].dtype == torch.float16


class Unflat(DefaultSavePlanner):
    """Saves the top level of a state only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


def test_a_flat_state_needs_no_flattening(tmp_path: Path) -> None:
    state = {"t": torch.ones(3), "n": {"k": [1, (2,)]}}
    dcp.save(state, storage_writer=SafetensorsWriter(tmp_path), planner=Unflat())
    back: dict[str, Any] = {"t": torch.zeros(3), "n": {"k": 0}}
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(back, storage_reader=SafetensorsReader(tmp_path), planner=planner)
    assert (back["t"].tolist(), back["n"]) == ([1, 1, 1], {"k": [1, (2,)]})


def test_planners_that_pickle_values_are_refused(tmp_path: Path) -> None:
    class Renaming(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            raise AssertionError("never called")

    save({"n": 1}, tmp_path)
    with pytest.raises(CheckpointException) as failed:
        dcp.load({"n": 0}, storage_reader=SafetensorsReader(tmp_path), planner=Renaming())
    error = failed.value.failures[0][0]
    assert isinstance(error, CheckpointError)
    assert "the planner Renaming cannot be used" in error.message


def test_torchs_own_planner_loads_values_too(tmp_path: Path) -> None:
    first, second = Loop("adamw"), Loop("adamw")
    first.step(3)
    save(first.state(), tmp_path)
    state = second.state()
    dcp.load(state, storage_reader=SafetensorsReader(tmp_path))
    second.restore(state)
    assert second.schedule.state_dict() == first.schedule.state_dict()
    assert (
        second.optimizer.state_dict()["param_groups"]
        == first.optimizer.state_dict()["param_groups"]
    )


def test_saving_without_the_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="use_collectives"):
        dcp.save(
            {"t": torch.ones(3)},
            storage_writer=SafetensorsWriter(tmp_path / "b"),
            use_collectives=False,
        )


CASES: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.zeros(2), "n": 0, "b": 1}, "'b': expected a value.*found no such key"),
    ({"n": 0}, r"'a': expected no such key.*found float32 \[2\]"),
    ({"a": torch.zeros(3), "n": 0}, r"'a': expected float32 \[3\].*found float32 \[2\]"),
    ({"a": torch.zeros(2).bfloat16(), "n": 0}, r"'a': expected bfloat16 .*found float32"),
    ({"a": 5, "n": 0}, r"'a': expected a value.*found float32"),
    ({"a": torch.zeros(2), "n": torch.zeros(1)}, r"'n': expected float32 \[1\].*found a value"),
]


@pytest.mark.parametrize(("state", "message"), CASES)
def test_a_state_that_does_not_fit_is_refused_and_unchanged(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    save({"a": torch.ones(2), "n": 4}, tmp_path)
    before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    with pytest.raises(CheckpointMismatchError, match=message):
        load(state, tmp_path)
    assert all(
        torch.equal(v, before[k]) if isinstance(v, Tensor) else v == before[k]
        for k, v in state.items()
    )
    with pytest.raises(CheckpointException) as failed:
        load_with_torch(state, tmp_path)
    assert isinstance(failed.value.failures[0][0], CheckpointMismatchError)


def test_torchs_own_planner_converts_no_type(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointException) as failed:
        dcp.load({"a": torch.zeros(2).double()}, storage_reader=SafetensorsReader(tmp_path))
    (error, _) = failed.value.failures[0]
    assert isinstance(error, CheckpointMismatchError)
    assert "'a': expected float64" in str(error)


def failure_of(folder: Path) -> GeoRayError:
    """How loading fails, which is the same in both ways."""
    state = {"a": torch.zeros(2), "n": 0}
    with pytest.raises(GeoRayError) as caught:
        load(state, folder)
    with pytest.raises(CheckpointException) as failed:
        load_with_torch(state, folder)
    error = failed.value.failures[0][0]
    assert (type(error), str(error)) == (type(caught.value), str(caught.value))
    return caught.value


def test_a_pickled_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(2), "n": 4}, checkpoint_id=tmp_path)
    error = failure_of(tmp_path)
    assert type(error) is CheckpointError
    assert f"{tmp_path / '.metadata'}: a pickled checkpoint, which is never read" in error.message
    assert "SafetensorsWriter" in error.fix


def test_a_checkpoint_of_a_run_is_another_kind(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(seal({"version": 2, "id": 1}))
    assert "a checkpoint of a run" in failure_of(tmp_path).message


def test_a_checkpoint_without_manifest_does_not_exist(tmp_path: Path) -> None:
    write_part({"a": torch.ones(2), "n": 4}, tmp_path, 0, 1)
    assert type(failure_of(tmp_path)) is CheckpointMissingError
    assert type(failure_of(tmp_path / "nowhere")) is CheckpointMissingError


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("where", [0, 20, -1])
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000-whole-000.safetensors"])
def test_a_changed_byte_is_found(tmp_path: Path, file: str, where: int) -> None:
    save({"a": torch.ones(2), "n": 4}, tmp_path)
    data = bytearray((tmp_path / file).read_bytes())
    data[where] ^= 1
    (tmp_path / file).write_bytes(data)
    error = failure_of(tmp_path)
    assert type(error) is CheckpointCorruptError
    assert str(tmp_path / file) in error.message


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000-whole-000.safetensors"])
def test_a_truncated_file_is_found(tmp_path: Path, file: str) -> None:
    save({"a": torch.ones(2), "n": 4}, tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-1])
    error = failure_of(tmp_path)
    assert type(error) is CheckpointCorruptError
    assert str(tmp_path / file) in error.message


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "n": 4}, tmp_path)
    (tmp_path / "rank-00000-whole-000.safetensors").unlink()
    error = failure_of(tmp_path)
    assert type(error) is CheckpointCorruptError
    assert "rank-00000-whole-000.safetensors" in error.message


def test_a_file_with_another_shape_than_stated_is_found(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    body = json.loads((tmp_path / "manifest.json").read_bytes())["manifest"]
    body["tensors"]["a"]["shape"] = body["tensors"]["a"]["chunks"][0]["sizes"] = [1, 2]
    body["tensors"]["a"]["chunks"][0]["offsets"] = [0, 0]
    (tmp_path / "manifest.json").write_bytes(seal(body))
    with pytest.raises(CheckpointCorruptError, match=r"it has no tensor 'a' of shape \[1, 2\]"):
        load({"a": torch.zeros(1, 2)}, tmp_path)


def test_a_reader_forgets_its_failure(tmp_path: Path) -> None:
    save({"n": 3}, tmp_path / "there")
    reader, state = SafetensorsReader(tmp_path / "missing"), {"n": 0}
    with pytest.raises(CheckpointException):
        dcp.load(state, storage_reader=reader)
    dcp.load(state, checkpoint_id=tmp_path / "there", storage_reader=reader)
    assert state == {"n": 3}


def change_dtype(body: dict[str, Any]) -> None:
    body["tensors"]["a"]["dtype"] = "F99"


def change_file(body: dict[str, Any]) -> None:
    body["tensors"]["a"]["chunks"][0]["file"] = "../../etc/passwd"


def change_sizes(body: dict[str, Any]) -> None:
    body["tensors"]["a"]["chunks"][0]["sizes"] = [1]


def change_key(body: dict[str, Any]) -> None:
    body["tensors"]["a"]["chunks"][0]["key"] = "other"


def change_value(body: dict[str, Any]) -> None:
    body["values"]["n"]["value"] = {"call": []}


def write_twice(body: dict[str, Any]) -> None:
    body["tensors"]["step"]["chunks"] *= 2


def add_key(body: dict[str, Any]) -> None:
    body["surprise"] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_dtype, "'a' has the unknown type 'F99'"),
        (change_file, "'a' is in a file that is not listed"),
        (change_sizes, "'a' is incomplete: 1 of 2 elements"),
        (change_key, "it has no tensor 'other' of shape"),
        (change_value, "a value is not valid"),
        (write_twice, "'step' is written more than once"),
        (add_key, "surprise"),
    ],
)
def test_a_manifest_that_was_edited_and_sealed_again_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    save({"a": torch.ones(2), "n": 4, "step": torch.tensor(1.0)}, tmp_path)
    file = tmp_path / "manifest.json"
    body = json.loads(file.read_bytes())["manifest"]
    change(body)
    file.write_bytes(seal(body))
    with pytest.raises(CheckpointCorruptError) as caught:
        load({"a": torch.zeros(2), "n": 0, "step": torch.tensor(0.0)}, tmp_path)
    assert message in caught.value.message
    blamed = "rank-00000-whole-000.safetensors" if change is change_key else "manifest.json"
    assert str(tmp_path / blamed) in caught.value.message


@pytest.mark.parametrize("value", [{"float": "1"}, {"dict": 3}, {"tuple": [], "dict": []}, {}])
def test_values_that_are_not_encoded_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode_value(value)
    assert canonical_json(encode_value("k", {"float": "1"})) == b'{"dict":[["float","1"]]}'


# ------------------------------------------------------------------ committing


def replicas(folder: Path, ranks: int = 2, **values: Any) -> list[PartRecord]:
    """Parts of ranks with equal states."""
    state = {"w": torch.arange(4.0), "n": 1}
    return [
        write_part({**state, **{k: v[rank] for k, v in values.items()}}, folder, rank, ranks)
        for rank in range(ranks)
    ]


def halves(folder: Path, ranks: int = 2) -> list[PartRecord]:
    """Parts of ranks that share a tensor."""
    found = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            shard = sharded(torch.arange(12.0).reshape(6, 2), (ranks,), [Shard(0)])
            found.append(write_part({"w": shard, "step": torch.tensor(2.0)}, folder, rank, ranks))
    return found


def test_replicas_are_written_once_and_one_is_enough(tmp_path: Path) -> None:
    records = replicas(tmp_path, 3)
    assert [len(record.files) for record in records] == [1, 0, 0]
    commit(tmp_path, records[:1])  # ranks 1 and 2 missed the deadline
    assert oracle(tmp_path)["w"].tolist() == [0, 1, 2, 3]


def test_of_replicas_of_shards_the_lowest_rank_writes(tmp_path: Path) -> None:
    records = []
    for rank in range(4):
        with as_rank(rank, 4):
            shard = sharded(torch.arange(6.0), (2, 2), [Replicate(), Shard(0)])
            records.append(write_part({"w": shard}, tmp_path, rank, 4))
    assert [len(record.files) for record in records] == [1, 1, 0, 0]
    commit(tmp_path, records[:2])  # the second replica missed the deadline
    assert oracle(tmp_path)["w"].tolist() == list(range(6))


def test_of_two_copies_the_lower_ranks_is_used(tmp_path: Path) -> None:
    def part(rank: int) -> PartRecord:
        with as_rank(0, 2):  # both believe that they are the first
            shard = sharded(torch.arange(4.0), (2,), [Replicate()])
            return write_part({"w": shard}, tmp_path, rank, 2)

    manifest = commit(tmp_path, [part(1), part(0)])
    assert [info.name for info in manifest.files] == ["rank-00000-shards-000"]
    assert oracle(tmp_path)["w"].tolist() == [0, 1, 2, 3]


def test_a_missing_shard_abandons_the_checkpoint(tmp_path: Path) -> None:
    records = halves(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        commit(tmp_path, records[:1])
    assert "tensor 'w' is incomplete: 6 of 12 elements" in caught.value.message
    assert "no record of rank 1" in caught.value.message
    assert "not committed" in caught.value.fix
    assert type(failure_of(tmp_path)) is CheckpointMissingError
    with pytest.raises(CheckpointError, match=r"'w' is incomplete: .*no record of rank 0"):
        commit(tmp_path, records[1:])


def test_records_may_come_in_any_order(tmp_path: Path) -> None:
    records = halves(tmp_path, 3)
    assert combine(records) == combine(reversed(records))
    commit(tmp_path, reversed(records))
    assert oracle(tmp_path)["w"].flatten().tolist() == list(range(12))


def test_a_late_part_changes_nothing(tmp_path: Path) -> None:
    records = replicas(tmp_path)
    commit(tmp_path, records)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        commit(tmp_path, records)
    with pytest.raises(CheckpointError, match="too late"):
        write_part({"w": torch.zeros(4), "n": 1}, tmp_path, 0, 2)
    with pytest.raises(CheckpointError, match="exists already"):
        save_with_torch_into(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def save_with_torch_into(folder: Path) -> None:
    try:
        save_with_torch({"w": torch.zeros(4)}, folder)
    except CheckpointException as error:
        raise error.failures[0][0] from None


def test_a_part_that_was_lost_is_found_at_the_commit(tmp_path: Path) -> None:
    records = halves(tmp_path)
    (tmp_path / records[1].files[0].file).unlink()
    with pytest.raises(CheckpointCorruptError, match=r"rank-00001.*missing"):
        commit(tmp_path, records)


def test_a_part_that_was_replaced_is_found_at_a_thorough_commit(tmp_path: Path) -> None:
    records = halves(tmp_path)
    file = tmp_path / records[1].files[0].file
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointCorruptError, match=r"rank-00001.*SHA-256"):
        commit(tmp_path, records, verify=True)
    commit(tmp_path, records)
    assert type(failure_of_shards(tmp_path)) is CheckpointCorruptError


def failure_of_shards(folder: Path) -> GeoRayError:
    with pytest.raises(GeoRayError) as caught:
        load({"w": torch.zeros(6, 2), "step": torch.tensor(0.0)}, folder)
    return caught.value


def test_ranks_that_differ_in_a_value_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        combine(replicas(tmp_path, step=[3, 4]))
    assert caught.value.message == "'step' differs: rank 0 has 3, rank 1 has 4"
    assert "same step" in caught.value.fix


def test_ranks_that_differ_in_a_shape_are_refused(tmp_path: Path) -> None:
    records = replicas(tmp_path, extra=[torch.ones(2), torch.ones(3)])
    with pytest.raises(CheckpointError, match=r"'extra' differs: rank 0 has F32 \[2\]"):
        combine(records)


def test_a_key_of_one_rank_must_be_named(tmp_path: Path) -> None:
    def part(rank: int, *only_here: str) -> PartRecord:
        state = {"w": torch.ones(2), f"random-{rank}": {"state": torch.full((3,), rank)}}
        state["random"] = state["random-1x"] = torch.zeros(1)  # other keys, of both ranks
        return write_part(state, tmp_path, rank, 2, only_here=only_here)

    with pytest.raises(CheckpointError, match=r"'random-1\.state' is incomplete.*by rank 1") as got:
        combine([part(0), part(1)])
    assert "only_here" in got.value.fix
    commit(tmp_path, [part(0, "random-0"), part(1, "random-1")])
    found = oracle(tmp_path)
    assert found["random-0.state"].tolist() == [0, 0, 0]
    assert found["random-1.state"].tolist() == [1, 1, 1]
    state = {"w": torch.zeros(2), "random": torch.ones(1), "random-1x": torch.ones(1)}
    load(state, tmp_path)  # of another world size: the keys of one rank need not be loaded
    assert state["w"].tolist() == [1, 1]


def test_a_key_of_one_rank_that_two_have_is_refused(tmp_path: Path) -> None:
    parts = [write_part({"k": 1}, tmp_path, rank, 2, only_here=["k"]) for rank in range(2)]
    with pytest.raises(CheckpointError, match="'k' is not a key of one rank: rank 0 and rank 1"):
        combine(parts)


def test_records_of_different_groups_are_refused(tmp_path: Path) -> None:
    two, three = replicas(tmp_path, 2), replicas(tmp_path, 3)
    with pytest.raises(CheckpointError, match="rank 0 of 2, rank 2 of 3"):
        combine([two[0], three[2]])
    with pytest.raises(CheckpointError, match="rank 0 of 2, rank 1 of 3"):
        combine([two[0], three[1]])
    with pytest.raises(CheckpointError, match="different groups: rank 0 of 2, rank 2 of 2"):
        combine([two[0], two[1].model_copy(update={"rank": 2})])
    with pytest.raises(CheckpointError, match="rank 0 has reported two parts"):
        combine([two[0], three[0]])
    with pytest.raises(CheckpointError, match="no rank has reported"):
        combine([])
    with pytest.raises(CheckpointError, match="'n' is a tensor in one rank"):
        combine([two[0], write_part({"n": torch.ones(1)}, tmp_path, 1, 2)])


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    first, second = halves(tmp_path)
    w = second.tensors["w"]
    (chunk,) = w.chunks
    overlapping = chunk.model_copy(update={"offsets": (2, 0), "sizes": (4, 2)})
    tensors = {**second.tensors, "w": w.model_copy(update={"chunks": (overlapping,)})}
    with pytest.raises(CheckpointError, match="'w' is written more than once"):
        combine([first, second.model_copy(update={"tensors": tensors})])
    outside = chunk.model_copy(update={"offsets": (4, 0)})
    tensors = {**second.tensors, "w": w.model_copy(update={"chunks": (outside,)})}
    with pytest.raises(CheckpointError, match=r"chunk outside of its shape \[6, 2\]"):
        combine([first, second.model_copy(update={"tensors": tensors})])
