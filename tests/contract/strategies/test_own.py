"""Strategies and codecs of the user's: they are loaded and checked as those of the library are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from geo_ray.api.run import open_run
from geo_ray.base.describe import describe
from geo_ray.base.errors import ConfigChangedError, ConfigError
from geo_ray.base.load import diff, digest, dump_yaml, json_schema, load_tree
from geo_ray.base.user_section import context
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory
from geo_ray.runs.report import LiveReader
from geo_ray.runtime.spec import RunSpec
from geo_ray.scheduler.queue.job_spec import JobSpec
from geo_ray.scheduler.queue.world import QueuedRun
from geo_ray.simulator.run import simulate
from geo_ray.sweep.compare import Case, experiment_of, parse_variant
from geo_ray.telemetry.events import RunObserver
from geo_ray.testing.run import checked, load

EXAMPLES = Path(__file__).parents[3] / "examples"
STRATEGY, CODEC = "own_strategy.py:Halfway", "own_codec.py:Rounded"
CONFIG = f"""
name: own
task: {{use: digits}}
data: {{generate: {{}}}}
regions: [{{name: eu}}, {{name: us}}]
strategy: {{use: "{STRATEGY}", interval: 2}}
codec: {{up: {{use: "{CODEC}", levels: 127}}, down: {{use: "{CODEC}"}}}}
optimizer: {{kind: sgd, lr: 0.1}}
train: {{steps: 4, eval_every: 2}}
emulate: {{link: {{rate_mbps: 100, delay_s: 0.01}}, step_s: 0.05}}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with both examples and a configuration that names them."""
    for path in EXAMPLES.glob("own_*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "own.yaml").write_text(CONFIG + f"run: {{dir: {tmp_path / 'runs'}}}\n")
    return tmp_path


def changed(place: Path, name: str, *changes: tuple[str, str]) -> str:
    """Make an example wrong; what it is to be called."""
    file = "own_strategy.py" if name == STRATEGY else "own_codec.py"
    text = (EXAMPLES / file).read_text()
    for old, new in changes:
        assert old in text, f"the example has no {old!r}"
        text = text.replace(old, new)
    (place / "changed.py").write_text(text)
    return f"changed.py:{name.rpartition(':')[2]}"


def of(place: Path) -> Experiment:
    return load_tree(place / "own.yaml", [], Experiment)


# ------------------------------------------------------------------ the checks


@pytest.mark.parametrize("name", [STRATEGY, CODEC])
def test_the_examples_keep_every_promise(name, place):
    assert [finding for finding in checked(load(name, [], place)) if finding.why] == []


FINISH = "        return Outgoing(region.params_P.clone(), wait=True)\n\n    def on_round"
AFTER = "        return Outgoing(region.params_P.clone(), wait=True)\n\n    def on_reply"
ROUND = "    def on_round"
ANSWER = '"""Reply to all regions with the mean."""'
START = "region.params_P.lerp_(reply.payload_P, "
MERGE = f"{START}self.fraction)"
OUTSIDE = [
    ("class Halfway", "_SEEN: list[int] = []\n\n\nclass Halfway"),
    (MERGE, f"_SEEN.append(1)\n            {START}1 / (2 + len(_SEEN) % 7))"),
]


@pytest.mark.parametrize(
    ("changes", "promise", "why"),
    [
        (
            [(AFTER, AFTER.replace(".clone()", ""))],
            "after the last exchange all regions are equal",
            "live state",
        ),
        (OUTSIDE, "it has no state outside of its state objects", "outside of its state"),
        ([(FINISH, FINISH.replace("Outgoing(region.params_P.clone(), wait=True)", "None"))],
         "after the last exchange all regions are equal", "apart"),
        ([("    def after_step", "    def on_gradient(self, region, grad_P):\n"
           "        zero_P = region.params_P * 0\n"
           "        region.apply_gradient(zero_P if grad_P is None else grad_P)\n\n"
           "    def after_step")],
         "a refused gradient changes nothing", "moved"),
        ([(MERGE, MERGE + "\n        import torch; region.params_P.mul_(1 + torch.rand(1) / 9)")],
         "the same run gives the same bits", "different bits"),
        ([(ROUND, "    def on_update(self, averager, update):\n"
           "        averager.waiting[update.region] = update\n"
           "        if len(averager.waiting) < len(averager.members):\n"
           "            return []\n"
           "        updates = [averager.waiting.pop(name) for name in averager.members]\n"
           "        return answer_all(averager, updates, update.payload_P.clone())\n\n" + ROUND)],
         "rounds do not depend on the order of updates", "order of arrival"),
        ([(ROUND, "    def on_update(self, averager, update):\n"
           "        return self.on_round(averager, [update])\n\n" + ROUND)],
         "traits: rounds answer all regions or none", "were answered"),
        ([("every=self.interval,", "every=self.interval + 1,")],
         "traits: the number of exchanges", "its traits state"),
        ([('blocking="always"', 'blocking="never"')],
         "traits: blocking of regions", "is blocked at once"),
        ([("params_P.clone(), wait=True)\n\n    def on_reply",
           "params_P.clone(), wait=False)\n\n    def on_reply")],
         "traits: blocking of regions", "trains on"),
        ([('sends="model"', 'sends="change"')],
         "traits: the meaning of payloads", "sends changes"),
        ([("            ),\n        )", '            ),\n            '
           'region=RegionTraits(eval_params="anchor", rate_key="strategy.speed"),\n        )'),
          ("import ExchangeTraits", "import RegionTraits, ExchangeTraits")],
         "traits: the evaluated memory is a model", "no memory 'anchor'"),
        ([("            ),\n        )", '            ),\n            '
           'region=RegionTraits(rate_key="strategy.speed"),\n        )'),
          ("import ExchangeTraits", "import RegionTraits, ExchangeTraits")],
         "traits: the key of the learning rate", "no option strategy.speed"),
        ([("            ),\n        )", '            ),\n            averager=AveragerTraits('
           'round_mean=RoundMean(weights="samples", is_answer=True)),\n        )'),
          ("import ExchangeTraits", "import AveragerTraits, RoundMean, ExchangeTraits")],
         "traits: rounds can be summed", "differs by"),
        ([("region.params_P.copy_(reply.payload_P)",
           "region.params_P.copy_(reply.payload_P.mul_(1.0001))")],
         "after the last exchange all regions are equal", "on_reply changes"),
        ([("    kind:", "    tags: list[int] = []\n    kind:")],
         "its options are frozen and strict", "option tags is a list"),
        ([(MERGE, MERGE.replace("self.fraction", "hash('x') % 97 / 200"))],
         "another process ends with the same bits", "other process"),
        ([(ANSWER, ANSWER + "\n        averager.members[4:] and averager.oh")],
         "four and five regions end with one model", "oh"),
        ([("        if region.since_send < self.interval:",
           "        if region.step % 5 < self.nothing:")],
         "after the last exchange all regions are equal", "AttributeError"),
    ],
)  # fmt: skip
def test_a_broken_strategy_is_found_by_the_right_check(changes, promise, why, place):
    (found,) = checked(load(changed(place, STRATEGY, *changes), [], place), [promise])
    said = found.why
    assert said is not None and why in said


@pytest.mark.parametrize(
    ("changes", "promise", "why"),
    [
        ([("lossy=True", "lossy=False")], "a lossless codec restores every bit", "other bits"),
        ([("bits_per_value=16", "bits_per_value=8")],
         "bytes are a row of the stated size", "its traits state 8"),
        ([("        reader.done()\n", "")], "invalid bytes are rejected", "too many"),
        ([("x_P = as_fp32(x_P)\n", "x_P = as_fp32(x_P).mul_(2).div_(2.5)\n")],
         "inputs and results share no memory", "changes the vector"),
        ([("scale_1 = torch.tensor([largest / self.levels])",
           "scale_1 = torch.tensor([(1 + torch.rand(1).item()) * largest / self.levels])")],
         "the same input gives the same bytes", "random state"),
        ([("class Rounded", "_LAST: list[float] = [1.0]\n\n\nclass Rounded"),
          ("        scale_1 =", "        largest += _LAST[0]\n        _LAST[0] = largest / 2\n"
           "        scale_1 =")],
         "a restored memory continues with the same bytes", "outside of its memory"),
        ([("            codes_P = (x_P", "            codes_P = 5 + (x_P")],
         "the decoded vector is no worse than zero", "exceeds their norm"),
        ([("class Rounded", "_SCALES: dict[int, float] = {}\n\n\nclass Rounded"),
          ("        return Coded(",
           "        _SCALES[x_P.numel()] = float(scale_1)\n        return Coded("),
          ("mul_(scale)", "mul_(_SCALES.get(num, 2 * scale))")],
         "another process decodes the same", "other values"),
        ([("        return Coded(",
           "        salted = torch.Generator().manual_seed(hash('x') % 2**31)\n"
           "        salt_P = torch.randint(0, 2, codes_P.shape, generator=salted)\n"
           "        codes_P += salt_P.to(codes_P.dtype)\n"
           "        return Coded(")],
         "another process decodes the same", "other bytes"),
        ([("return codes_P.to(torch.float32).mul_(scale)", "return codes_P.to(torch.float64)")],
         "the decoded vector is no worse than zero", "float64"),
    ],
)  # fmt: skip
def test_a_broken_codec_is_found_by_the_right_check(changes, promise, why, place):
    options = ["levels=3"] if "exceeds their norm" in why else []
    (found,) = checked(load(changed(place, CODEC, *changes), options, place), [promise])
    said = found.why
    assert said is not None and why in said


def test_the_command_says_what_failed_and_ends_with_1(place, monkeypatch):
    monkeypatch.chdir(place)
    good = CliRunner().invoke(root, ["check", CODEC, "--option", "levels=7"])
    assert good.exit_code == 0 and "14 of 14 checks passed" in good.output
    wrong = changed(place, CODEC, ("bits_per_value=16", "bits_per_value=8"))
    bad = CliRunner().invoke(root, ["check", wrong])
    assert bad.exit_code == 1 and "13 of 14 checks passed" in bad.output
    assert "failed  bytes are a row of the stated size: a value takes 16 bits" in bad.output


# ------------------------------------------------------------------ what is refused before


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ([("def traits", "def trait")], [], "has no traits"),
        ([('    kind: Literal["halfway"] = "halfway"\n', "")], [], "`kind` is ''"),
        ([("return Traits(", "return dict(")], [], "`traits` returns dict"),
        ([("def on_reply(self, region: RegionState, reply", "def on_reply(self, reply")],
         [], r"on_reply cannot be called as on_reply\(region, reply\)"),
        ([("class Halfway(Rounds)", "class Halfway")], [], "not a class of options"),
        ([('kind: Literal["halfway"] = "halfway"', 'kind: Literal["sma"] = "sma"')], [],
         "`kind` is 'sma'"),
        ([("    fraction: float", "    use: float")], [], "'use' has the name of another key"),
        ([("        return Traits(", "        return self.nothing(")], [],
         r"changed.py:\d+: AttributeError"),
        ([], ["intervall=3"], "no option 'intervall'; did you mean 'interval'"),
        ([], ["interval=0"], "option.interval.*greater than or equal to 1"),
        ([], ["fraction=yes"], "option.fraction"),
        ([("class Halfway", "class Other")], [], "'Halfway' of changed.py does not exist"),
        ([("from typing", "raise ValueError('no')\nfrom typing")], [], "ValueError: no"),
    ],
)  # fmt: skip
def test_what_is_no_strategy_is_refused_with_the_reason(changes, options, why, place):
    name = changed(place, STRATEGY, *changes)
    with pytest.raises(ConfigError, match=why):
        load(name, options, place)


def test_what_is_neither_or_both_is_told(place):
    (place / "none.py").write_text("class X:\n    pass\n")
    with pytest.raises(
        ConfigError, match=r"is not a strategy, .* on_gradient, .*; .* encode, decode"
    ):
        load("none.py:X", [], place)
    half = "class X:\n    def encode(self): ...\n    def on_reply(self): ...\n"
    (place / "both.py").write_text(half)
    with pytest.raises(ConfigError, match="a strategy and of a codec"):
        load("both.py:X", [], place)


def test_wrong_options_are_answered_with_those_that_there_are(place):
    with pytest.raises(ConfigError, match="did you mean 'interval'") as caught:
        load(STRATEGY, ["intervall=3"], place)
    assert "interval (default 4: local steps between two exchanges); fraction (" in caught.value.fix


def test_a_file_that_is_not_there_is_named(place):
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        load("nowhere.py:Mine", [], place)
    with pytest.raises(ConfigError, match="no module 'no_such_package'"):
        load("no_such_package.module:Mine", [], place)


def test_rules_hold_for_own_classes_too(place):
    text = (place / "own.yaml").read_text()
    (place / "own.yaml").write_text(text + "overlay: {kind: ring}\n")
    with pytest.raises(ConfigError, match="'halfway' is not made of such rounds"):
        of(place)


# ------------------------------------------------------------------ in a run


def test_it_survives_the_file_and_knows_its_content(place):
    experiment = of(place)
    assert (experiment.strategy.kind, experiment.codec.up.levels) == ("halfway", 127)
    (place / "again.yaml").write_text(dump_yaml(experiment))
    again = load_tree(place / "again.yaml", [], Experiment)
    assert again == experiment and digest(again) == digest(experiment)
    text = experiment.model_dump_json()
    assert Experiment.model_validate_json(text, context=context(place)) == experiment
    with pytest.raises(ConfigError, match="does not exist"):  # relative to somewhere else
        Experiment.model_validate_json(text, context=context(place / "elsewhere"))
    spec = RunSpec(text, str(place), str(place), "", "run")
    assert spec.experiment == experiment


def test_the_schema_tells_of_it():
    assert "strategy.use" in describe(Experiment)
    assert "OwnClass" in json_schema(Experiment)["$defs"]


def test_a_run_is_not_resumed_with_another_content(place):
    run = directory.create(of(place), place)
    assert directory.reopen(run.path)[1] == of(place)
    file = place / "own_strategy.py"
    file.write_text(file.read_text() + "# another\n")
    with pytest.raises(ConfigChangedError, match=r"own_strategy\.py:Halfway"):
        directory.reopen(run.path)
    with pytest.raises(ConfigChangedError, match=r"own_strategy\.py:Halfway"):  # of each its own
        directory.reopen(run.path, allowed=["own_codec.py"])
    _, changed_own = directory.reopen(run.path, allowed=["own_strategy.py"])
    assert changed_own == of(place)
    file.unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        directory.reopen(run.path, allowed=["own_strategy.py"])


@pytest.fixture
def spied(place: Path) -> tuple[Path, Path]:
    """A finished run whose strategy and codec files now write a file when they are imported."""
    experiment = of(place)
    run = directory.create(experiment, place)
    simulate(experiment, run, RunObserver())
    proof = place / "proof"
    for file in ("own_strategy.py", "own_codec.py"):
        (place / file).write_text(f"open({str(proof)!r}, 'w').close()\nraise SystemExit(7)\n")
    return run.path, proof


READ_ONLY = ("status", "status --json", "members", "checkpoints", "report", "watch --terminal")


def test_what_only_reads_a_run_imports_nothing_of_it(spied, monkeypatch):
    run, proof = spied
    monkeypatch.chdir(run.parent)
    for command in READ_ONLY:
        name, *options = command.split()
        said = CliRunner().invoke(root, [name, str(run), *options])
        assert said.exit_code == 0 and not proof.exists(), (command, said.output)
    assert open_run(run).table().num_rows == 2
    live = LiveReader(lambda: run)
    assert live.read(100_000) == 1.0 and live.view().status.strategy == "halfway"
    spec = JobSpec.model_construct(anywhere=False, regions={})
    seen = QueuedRun(str(run), spec).begin_look()()
    assert seen.end == "finished" and seen.done == 1.0
    assert not proof.exists()


def test_a_read_only_configuration_is_that_of_the_run(place):
    run = directory.create(of(place), place)
    read, loaded = directory.reopen(run.path, read_only=True)[1], directory.reopen(run.path)[1]
    assert digest(read) == digest(loaded) and diff(read, loaded) == []
    with pytest.raises(ConfigError, match="was not imported"):
        _ = read.strategy.traits


def test_a_changed_file_is_refused_before_it_is_imported(spied):
    run, proof = spied
    with pytest.raises(ConfigChangedError, match=r"own_strategy\.py:Halfway"):
        directory.reopen(run)
    text = json.dumps(yaml.safe_load((run / "config.lock.yaml").read_text()))
    place = str(run.parents[1])
    with pytest.raises(ConfigChangedError):  # what an actor on any node does
        _ = RunSpec(text, place, place, "", "run").experiment
    assert not proof.exists()


def test_a_module_is_hashed_before_its_package_is_imported(place, monkeypatch):
    package = place / "site" / "own_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    strategy = package / "halves.py"
    strategy.write_text((EXAMPLES / "own_strategy.py").read_text())
    monkeypatch.syspath_prepend(str(place / "site"))
    text = (place / "own.yaml").read_text().replace(STRATEGY, "own_package.halves:Halfway")
    (place / "own.yaml").write_text(text)
    run = directory.create(of(place), place)
    assert directory.reopen(run.path)[1] == of(place)
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        monkeypatch.delitem(sys.modules, name)
    for file in (package / "__init__.py", strategy):
        file.write_text("raise SystemExit(7)\n")
    with pytest.raises(ConfigChangedError, match=r"own_package\.halves:Halfway"):
        directory.reopen(run.path)
    strategy.unlink()
    with pytest.raises(ConfigError, match=r"no module 'own_package\.halves'"):
        directory.reopen(run.path)


def test_a_class_that_a_module_only_imports_is_named_where_it_is_defined(place, monkeypatch):
    (place / "own_halves.py").write_text((EXAMPLES / "own_strategy.py").read_text())
    (place / "own_names.py").write_text("from own_halves import Halfway\n")
    monkeypatch.syspath_prepend(str(place))
    with pytest.raises(ConfigError, match="is defined in own_halves") as caught:
        load("own_names:Halfway", [], place)
    assert "own_halves:Halfway" in caught.value.fix


def test_it_is_simulated_and_compared(place):
    experiment = of(place)
    run = directory.create(experiment, place)
    summary = simulate(experiment, run, RunObserver())
    assert summary.strategy == "halfway" and "rounded" in str(summary.codec)
    variant = parse_variant(f"{STRATEGY}:fraction=1.0:codec=int8", place)
    made_of = experiment_of(Case(variant, 2.0, 0), place / "own.yaml", [], place / "out")
    assert made_of.strategy.fraction == 1.0 and made_of.codec.down.kind == "int8"
    assert made_of.optimizer.lr == 0.2
