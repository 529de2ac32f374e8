"""What the simulator says about the quickstart, against the real run of the same configuration.

For each strategy the quickstart runs on real actors (links shaped inside the transport, steps
padded, as its `emulate` section says) and on the virtual clock. Asked: predicted training time
within 10 % of the real one, the simulator at least 3 times faster than real time (its whole command
against the training time of the real run), for `bsp` and `sma` bit-equal final parameters, and for
the others a final loss within noise: no further from the real one than simulated seeds differ.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import support
from benchmarks.common.command import geo_ray

CONFIG = support.REPOSITORY / "configs" / "quickstart.yaml"
STRATEGIES = {
    "sma": "{kind: sma, interval: 4}",
    "bsp": "{kind: bsp}",
    "asgd": "{kind: asgd}",
    "asgd_ga": "{kind: asgd_ga, interval: 4}",
    "ama": "{kind: ama, interval: 4}",
    "diloco": "{kind: diloco, interval: 8, outer: {kind: nesterov, momentum: 0.5}}",
    "diloco_streaming": "{kind: diloco_streaming, interval: 8, tau: 1}",
    "nbsync": "{kind: nbsync, merge: correct}",
    "async_local_sgd": "{kind: async_local_sgd, interval: 8, outer: {momentum: 0.5}}",
    "halos": "{kind: halos, local_steps: 2, interval: 2}",
}
DETERMINISTIC = ("sma", "bsp")
SEEDS = (0, 1, 2, 3)


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--cases", help="only these strategies, separated by commas")
    options = parser.parse_args()
    machine = support.hardware()
    names = DETERMINISTIC[:1] if options.quick else tuple(STRATEGIES)
    names = tuple(options.cases.split(",")) if options.cases else names
    repeats = 1 if options.quick else 3
    figures: list[support.Figure] = []
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            figures += compare(name, Path(directory), repeats if name in DETERMINISTIC else 1)
    support.finish("sim_prediction", machine, figures, options.out)


def compare(name: str, directory: Path, repeats: int) -> list[support.Figure]:
    """Run one strategy both ways; ``repeats`` times for real."""
    sets = {"strategy": STRATEGIES[name]}
    support.say(f"{name}: simulate")
    simulated = [geo_ray("simulate", CONFIG, sets, directory / f"sim{i}") for i in range(repeats)]
    real = []
    for number in range(repeats):
        support.say(f"{name}: train, run {number + 1} of {repeats}")
        real.append(geo_ray("train", CONFIG, sets, directory / f"real{number}"))
    predicted_s = simulated[0].summary["seconds"]
    real_s = [run.summary["seconds"] for run in real]
    errors = [abs(predicted_s / seconds - 1.0) for seconds in real_s]
    speeds = [seconds / run.wall_s for seconds, run in zip(real_s, simulated, strict=True)]
    digests = {run.summary["digest"] for run in [*simulated, *real]}
    figures = [
        support.Figure(f"{name}_predicted_s", predicted_s, "s"),
        support.median(f"{name}_real_s", real_s, "s"),
        support.median(f"{name}_prediction_error", errors, "ratio", "<= 0.1"),
        support.median(f"{name}_sim_speed_over_real_time", speeds, "ratio", ">= 3"),
    ]
    if name not in DETERMINISTIC:
        seeds = [
            geo_ray("simulate", CONFIG, {**sets, "seed": seed}, directory / f"seed{seed}")
            for seed in SEEDS
        ]
        losses = [run.summary["eval"]["loss"] for run in seeds]
        apart = abs(simulated[0].summary["eval"]["loss"] - real[0].summary["eval"]["loss"])
        noise = (max(losses) - min(losses)) or 1e-9
        figures.append(support.Figure(f"{name}_loss_apart_over_noise", apart / noise, "1", "<= 1"))
    if name in DETERMINISTIC:
        equal = float(len(digests) == 1)
        figures.append(support.Figure(f"{name}_digests_equal", equal, "1 = yes", ">= 1"))
    return figures


if __name__ == "__main__":
    main()
