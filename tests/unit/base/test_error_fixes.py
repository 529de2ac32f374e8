"""What the terminal shows of an error, and whether its fix fits the cause and works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from geo_ray.api.train import name_run, resumed_run
from geo_ray.base import errors
from geo_ray.base.errors import every_class
from geo_ray.base.load import load_tree
from geo_ray.base.yaml import parse_yaml
from geo_ray.cli import main as entry
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.lease import LEASE_KEY, LeaseRecord, Owner, encode_record
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest
from geo_ray.storage.parts import write_part
from geo_ray.testing.reference_pages import EXAMPLE, errors_page
from tests.support.job_support import experiment
from tests.support.observe_support import evaluation, started, write
from tests.support.watched_runs import run_begins

TWO_MISTAKES = """\
name: job
task: {use: digits}
data: {generate: {}}
regions: [{name: eu}]
train:
  steps: many
  eval_evry: 5
strategy: {kind: bsp}
optimizer: {kind: sgd}
"""


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "geo_ray.cli.main", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(root, [*words])


def failure(result: Result) -> errors.GeoRayError:
    assert isinstance(result.exception, errors.GeoRayError), result.output
    return result.exception


# ------------------------------------------------------------------ the form


def test_the_page_shows_what_the_terminal_shows(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(TWO_MISTAKES)
    done = command("train", "job.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    told = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
    assert told == f"error {EXAMPLE}".splitlines()
    block = "".join(f"    {line}\n" for line in told)
    assert f"\n{block}\n" in errors_page()


FAILING = click.Command("fail")


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.code)
def test_every_error_has_the_form_of_the_page(
    kind: type[errors.GeoRayError],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise kind("the words of it")

    monkeypatch.setattr(FAILING, "callback", fail)
    monkeypatch.setitem(entry._COMMANDS, "fail", "")
    monkeypatch.setitem(sys.modules, "geo_ray.cli.fail", SimpleNamespace(fail=FAILING))
    with pytest.raises(SystemExit) as ended:
        entry.main(["fail"])
    assert ended.value.code == kind.exit_code
    said = capsys.readouterr().err
    if kind is errors.InterruptedRunError:  # nothing is broken; its section says so
        assert said == f"stopped: the words of it\n  {kind.advice}\n"
    else:
        (form,) = re.findall(
            r"^    (error \[CODE\]) what .*\n    (  fix:) what .*$", errors_page(), re.M
        )
        head, tail = form[0].replace("CODE", kind.code), form[1]
        assert said == f"{head} the words of it\n{tail} {kind.advice}\n"


# ------------------------------------------------------------------ configurations


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 1\nsteps: 2", "Remove one of the two"),
        ("a: &x 1", "in quotes"),
        ("a: !!int 3", "Remove the tag"),
        ("a: .inf", "finite number"),
        ("a: 1\n---\nb: 1", "remove the line `---`"),
        ("a: b: c", "indentation"),
        ("? \n: 1", "a word before the colon"),
    ],
)
def test_what_is_wrong_with_a_file_has_its_own_fix(text: str, words: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        parse_yaml(text, "job.yaml")
    assert words in caught.value.fix
    assert "schema" not in caught.value.fix


def test_a_lab_is_not_sent_to_the_keys_of_a_run(tmp_path: Path) -> None:
    from geo_ray.lab.topology import load_topology

    (tmp_path / "lab.yaml").write_text("regions: [{name: A}]\nspeed: 1\n")
    with pytest.raises(errors.ConfigError) as caught:
        load_topology(tmp_path / "lab.yaml")
    assert "docs/guides/wan-lab.md" in caught.value.fix


# ------------------------------------------------------------------ resuming


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose cluster is not there: what refuses a resume comes before that is found out."""
    monkeypatch.chdir(tmp_path)
    nowhere = "cluster={kind: existing, address: '127.0.0.1:9', connect_timeout_s: 1}"
    return directory.create(experiment(nowhere), tmp_path)


def save_checkpoint(run: RunDirectory) -> None:
    store = CheckpointStore(run.checkpoints)
    part = write_part(store.begin(0), "a", {"x": torch.ones(3)}, {})
    store.commit(
        0,
        CheckpointManifest(
            id=0, step=5, created="-", config_digest="ab" * 32, parts=(part,), extra={"attempt": 1}
        ),
    )


def finish(run: RunDirectory, *, simulated: bool = False, cause: str | None = None) -> None:
    rows = [started(simulated=simulated), evaluation(10, 9.0, loss=0.5)]
    if cause is not None:
        rows.append(("stop_requested", 9.5, {"cause": cause}))
    write(run.path / "events.jsonl", [*rows, ("run_finished", 10.0, {"summary": {}})])
    run.model.write_bytes(b"weights")


def resumed(run: RunDirectory, *more: str) -> errors.GeoRayError:
    return failure(invoke("train", "--resume", str(run.path), *more))


def advised(error: errors.GeoRayError) -> list[str]:
    """The command that the advice names, as somebody would type it."""
    (line,) = re.findall(r"`geo-ray (train [^`]+)`", error.fix)
    return shlex.split(line)


def test_a_finished_run_says_where_its_model_is_and_how_to_go_on(run: RunDirectory) -> None:
    finish(run)
    save_checkpoint(run)
    error = resumed(run)
    assert isinstance(error, errors.RunFinishedError)
    assert "is finished after" in error.message and str(run.model) in error.message
    assert advised(error) == ["train", "--resume", "runs/trial", "--set",
                              f"train.steps={2 * experiment().train.steps}"]  # fmt: skip
    # The advice is taken: nothing is refused before the run itself begins.
    again = failure(invoke(*advised(error), "--plain"))
    assert isinstance(again, errors.RayUnreachableError), again


def test_a_finished_run_goes_on_from_a_checkpoint_that_is_named(run: RunDirectory) -> None:
    finish(run)
    save_checkpoint(run)
    (id,) = CheckpointStore(run.checkpoints).ids()
    begun = resumed(run, "--from", str(id), "--plain")
    assert isinstance(begun, errors.RayUnreachableError), begun
    missing = resumed(run, "--from", str(id + 1))
    assert isinstance(missing, errors.CheckpointMissingError)
    assert "no such checkpoint" in missing.message


@pytest.mark.parametrize("more", [("--from", "0"), ()])
def test_a_run_cannot_end_before_the_checkpoint_that_it_goes_on_from(
    more: tuple[str, ...], run: RunDirectory
) -> None:
    if more:
        finish(run)
    save_checkpoint(run)  # after step 5
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    error = resumed(run, *more, "--set", "train.steps=4")
    assert isinstance(error, errors.CheckpointMissingError)
    assert "saved after 5 steps, but train.steps is 4" in error.message
    assert "--from ID" in error.fix and "5 or more" in error.fix
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    begun = resumed(run, *more, "--set", "train.steps=5", "--plain")
    assert isinstance(begun, errors.RayUnreachableError), begun


@pytest.mark.parametrize(
    ("regions", "keys", "enough"),
    [
        # Servers count pushes: 2 steps of 3 workers are 6.
        ("[{name: a, workers: 3}, {name: b}]", ("strategy={kind: asgd}", "train.mode=async"), 2),
        # 3 steps of 40 rows: the first region alone may do them, 4 rows at a time.
        (
            "[{name: a, batch_sizes: [4]}, {name: b, batch_sizes: [36]}]",
            ("strategy={kind: asgd}", "train.count=total"),
            1,
        ),
    ],
)
def test_steps_of_a_checkpoint_are_compared_as_they_are_counted(
    regions: str,
    keys: tuple[str, ...],
    enough: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    nowhere = "cluster={kind: existing, address: '127.0.0.1:9', connect_timeout_s: 1}"
    run = directory.create(
        experiment(nowhere, f"regions={regions}", *keys, f"train.steps={enough}"), tmp_path
    )
    save_checkpoint(run)  # after step 5 of a server
    begun = resumed(run, "--plain")
    assert isinstance(begun, errors.RayUnreachableError), begun


def test_a_run_that_met_its_target_is_told_to_leave_it_out(run: RunDirectory) -> None:
    finish(run, cause="loss reached 0.5")
    save_checkpoint(run)
    assert advised(resumed(run))[-1] == "train.target=null"


def test_a_finished_run_without_checkpoint_cannot_go_on(run: RunDirectory) -> None:
    finish(run)
    error = resumed(run)
    assert isinstance(error, errors.RunFinishedError) and error.code == "RUN_FINISHED"
    assert "is finished" in error.message and "no checkpoint" in error.fix
    assert "--set checkpoint.every_s=10`" in error.fix
    more = ["--set", "train.steps=1000"]
    assert resumed(run, *more).message == error.message


def test_a_simulated_run_has_nothing_to_resume(run: RunDirectory) -> None:
    finish(run, simulated=True)
    assert "was simulated" in resumed(run).message
    assert "simulations write no checkpoints" in invoke("checkpoints", str(run.path)).output


def test_a_run_that_ended_early_is_started_again(run: RunDirectory) -> None:
    write(run.path / "events.jsonl", [started()])
    error = resumed(run)
    assert "before its first checkpoint" in error.message
    assert "geo-ray train CONFIG" in error.fix and "--resume" not in error.fix


def test_processes_of_a_killed_run_actor_are_sought_without_a_checkpoint(
    run: RunDirectory,
) -> None:
    """It has not given its lease back; here the cluster cannot be asked."""
    write(run.path / "events.jsonl", [started()])
    owner = Owner(host="h", pid=2**22, nonce="t", since="2026-11-25T10:00:00+00:00")
    killed = LeaseRecord(token=1, renewal=3, owner=owner, lives_s=0.01)
    (run.path / LEASE_KEY).write_bytes(encode_record(killed))
    assert isinstance(resumed(run, "--plain"), errors.RayUnreachableError)
    ended = killed.model_copy(update={"released": True})
    (run.path / LEASE_KEY).write_bytes(encode_record(ended))
    assert "before its first checkpoint" in resumed(run).message


def test_the_key_that_non_finite_advises_is_taken_by_a_resume(run: RunDirectory) -> None:
    save_checkpoint(run)
    error = name_run(errors.NonFiniteError("refused 3 steps in a row"), run.path)
    words = advised(error)
    assert "train.clip_norm=1.0" in words
    taken = failure(invoke(*words, "--plain"))
    assert isinstance(taken, errors.RayUnreachableError), taken
    config = load_tree(run.path / directory.CONFIG_FILE, [], Experiment)
    assert config.train.clip_norm is None, "the run has not gone on"
    change = ("train.clip_norm=1.0",)
    ready = resumed_run(run.path, None, change, None)
    run_begins(ready)
    config = load_tree(run.path / directory.CONFIG_FILE, [], Experiment)
    assert config.train.clip_norm == 1.0, "the next resumption would forget the changed key"


def changed_config(run: RunDirectory, changes: dict[str, Any]) -> Path:
    """The configuration of a run with other values of some sections, in a file of its own."""
    tree = yaml.safe_load((run.path / directory.CONFIG_FILE).read_text())
    for section, keys in changes.items():
        tree[section] |= keys
    path = run.path.parent / "changed.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_change_in_the_configuration_must_be_named(run: RunDirectory) -> None:
    save_checkpoint(run)
    config = changed_config(run, {"train": {"clip_norm": 1.0}, "optimizer": {"lr": 0.5}})

    def resume(*words: str) -> errors.GeoRayError:
        return failure(invoke("train", str(config), "--resume", str(run.path), *words, "--plain"))

    error = resume("--allow-change", "train")
    assert isinstance(error, errors.ConfigChangedError)
    assert "optimizer.lr: " in error.message and "clip_norm" not in error.message
    assert error.fix.endswith("allow the changes: --allow-change optimizer.lr.")
    assert isinstance(resume("--allow-change", "optim"), errors.ConfigChangedError)
    named = ("--allow-change", "train.clip_norm", "--allow-change", "optimizer")
    assert isinstance(resume(*named), errors.RayUnreachableError)
    saved = load_tree(run.path / directory.CONFIG_FILE, [], Experiment)
    assert saved.train.clip_norm is None, "the run has not gone on"
    ready = resumed_run(run.path, config, (), None, allowed=["train", "optimizer"])
    assert "changed: train.clip_norm: null -> 1.0" in ready.note.splitlines()


def test_a_change_of_where_a_run_is_executed_need_not_be_named(run: RunDirectory) -> None:
    save_checkpoint(run)
    config = changed_config(run, {"run": {"again": "resume"}, "checkpoint": {"every_s": 7.0}})
    ready = resumed_run(run.path, config, (), None)
    assert ready.is_changed and ready.experiment.run.again == "resume"
    assert 'changed: run.again: "new" -> "resume"' in ready.note


@pytest.mark.parametrize(
    ("strategy", "optimizer", "workers", "said"),
    [
        (
            "hfa",
            "momentum",
            4,
            "eu has 4 workers instead of 2: new ones start with",
        ),
        (
            "hfa",
            "momentum",
            1,
            "eu has 1 worker instead of 2: the optimizer's states",
        ),
        ("hfa", "sgd", 4, ""),  # which has no state
        ("sma", "momentum", 4, ""),  # the parameter server has the optimizer
    ],
)
def test_a_resume_says_what_becomes_of_optimizers_of_workers(
    strategy: str,
    optimizer: str,
    workers: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = (
        f"strategy={{kind: {strategy}}}",
        f"optimizer={{kind: {optimizer}, lr: 0.1}}",
        "regions=[{name: eu, workers: 2}, {name: us}]",
    )
    run = directory.create(experiment(*sections), tmp_path)
    save_checkpoint(run)
    note = resumed_run(run.path, None, (f"regions.0.workers={workers}",), None).note
    assert said in note and ("optimizer" in note) == bool(said) and "us has" not in note


@pytest.mark.parametrize("more", [(), ("optimizer.schedule.steps=20",)])
def test_a_schedule_that_is_stretched_is_told_of(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cosine = "optimizer={kind: sgd, lr: 0.1, schedule: {kind: cosine, last: 0.0}}"
    run = directory.create(experiment(cosine, "train.steps=20"), tmp_path)
    save_checkpoint(run)
    note = resumed_run(run.path, None, ("train.steps=40", *more), None).note
    assert ("spans 40 steps instead of 20: at step 20 the rate is 50% of" in note) == (not more)
    assert ("`--set optimizer.schedule.steps=20` keeps the old" in note) == (not more)


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        ("[{name: eu, workers: 2}]", "'us' is in the run"),
        ("[{name: eu}, {name: us, ps_shards: 2}, {name: asia}]", "'asia' is not in the run"),
        ("[{name: eu}, {name: us}]", "'us' has 2 parameter server shards"),
        ("[{name: eu, ps_shards: 2}, {name: us, ps_shards: 2}]", "'eu' has 1 parameter server"),
    ],
)
def test_other_regions_or_shards_are_refused_whatever_is_allowed(
    run: RunDirectory, regions: str, said: str
) -> None:
    save_checkpoint(run)
    error = resumed(run, "--set", f"regions={regions}")
    assert isinstance(error, errors.ConfigChangedError) and said in error.message
    workers = "regions=[{name: eu, workers: 3}, {name: us, ps_shards: 2}]"
    taken = resumed(run, "--set", workers, "--plain")
    assert isinstance(taken, errors.RayUnreachableError), taken


@pytest.mark.parametrize(
    "kind",
    [k for k in every_class() if "--resume RUN" in k.advice],
    ids=lambda k: k.code,
)
def test_nobody_is_told_to_resume_what_was_not_saved(
    kind: type[errors.GeoRayError], run: RunDirectory
) -> None:
    before = name_run(kind("it stopped"), run.path).fix
    assert "resume" not in before.lower() and "geo-ray train CONFIG" in before
    assert before.endswith("No checkpoint was saved.")
    save_checkpoint(run)
    assert "--resume runs/trial" in name_run(kind("it stopped"), run.path).fix
