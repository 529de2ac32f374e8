"""How fast the simulator is with many sites: 100 of them, 1,000 rounds, a model of 10 k parameters.

`ctr` with 9,826 parameters and batches of 8 rows; a step is a round (`bsp`), so 100,000 real
gradients and as many exchanges. The whole command is timed, with imports, data, every event
written and the summary. Asked: under 60 s.

  seconds_*       of the command, by strategy
  per_step_ms_*   the same per gradient
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import support
from benchmarks.common.command import geo_ray

SITES, ROUNDS = 100, 1000
STRATEGIES = {"bsp": "{kind: bsp}", "fedat": "{kind: fedat, interval: 4}"}
CONFIG = f"""
name: many_sites
task: {{use: ctr, options: {{rows: 20000, hidden: 64}}}}
data: {{generate: {{rows_per_shard: 128}}, batch_size: 8}}
regions: [{{name: s, copies: {SITES}}}]
strategy: {{kind: bsp}}
optimizer: {{kind: sgd, lr: 0.1}}
train: {{steps: {ROUNDS}, eval_every: 0}}
emulate: {{link: {{rate_mbps: 100, delay_s: 0.05}}, step_s: 0.05}}
checkpoint: {{every_s: null}}
"""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    rounds, repeats = (50, 1) if options.quick else (ROUNDS, 3)
    figures: list[support.Figure] = []
    for name, strategy in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            config = root / "many_sites.yaml"
            config.write_text(CONFIG, "utf-8")
            sets = {"strategy": strategy, "train.steps": rounds}
            walls_s = []
            for number in range(repeats if name == "bsp" else 1):
                walls_s.append(geo_ray("simulate", config, sets, root / f"run{number}").wall_s)
                support.say(f"{name}: {walls_s[-1]:.1f} s")
        asked = "<= 60" if name == "bsp" and not options.quick else None
        figures.append(support.median(f"seconds_{name}", walls_s, "s", asked))
        per_step_ms = [1000 * wall_s / (SITES * rounds) for wall_s in walls_s]
        figures.append(support.median(f"per_step_ms_{name}", per_step_ms, "ms"))
    support.finish("many_sites", machine, figures, options.out)


if __name__ == "__main__":
    main()
