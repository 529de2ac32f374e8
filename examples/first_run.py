"""A first run, cell by cell."""

# %% [markdown]
# # A first run
# Three regions train one small model on handwritten digits. Everything here is simulated: gradients
# are real, the network and the clock are not, so it needs no cluster and takes seconds. Each `# %%`
# is a cell; open the file in VS Code or Jupyter (with Jupytext), or run it as it is.

# %%
import geo_ray

config = {
    "name": "first",
    "task": {"use": "digits", "options": {"width": 4}},
    "data": {"generate": {"split": {"kind": "dirichlet", "alpha": 0.5}}, "batch_size": 16},
    "regions": [{"name": "us-east"}, {"name": "eu-west"}, {"name": "ap-south"}],
    "strategy": {"kind": "sma", "interval": 4},
    "optimizer": {"kind": "momentum", "lr": 0.05},
    "train": {"steps": 60, "eval_every": 20},
    "emulate": {"link": {"rate_mbps": 20, "delay_s": 0.05}, "step_s": 0.05},
}
run = geo_ray.simulate(config)
run

# %% [markdown]
# What it came to, and its curves as tables: `.to_arrow()` and `.to_pandas()` convert them.

# %%
print(run.summary.eval, run.summary.wan_bytes)
for row in run.metrics("eval.accuracy").to_pylist():
    if row["region"] is None:  # all regions together
        print(f"step {row['step']:3d}  {row['time_s']:5.1f} s  accuracy {row['value']:.3f}")

# %% [markdown]
# Events are values, too. Here: how long each region waited for others.

# %%
waits_s = dict.fromkeys(run.experiment.region_names, 0.0)
for event in run.events("step"):
    waits_s[event["region"]] += event["wait_s"]
print({region: round(wait_s, 2) for region, wait_s in waits_s.items()})

# %% [markdown]
# The trained module, and a file that plain PyTorch loads.

# %%
model = run.model()
print(sum(parameter.numel() for parameter in model.parameters()), "parameters")
print(run.export("first.pt"), run.report_path.name)

# %% [markdown]
# A mistake is the same error as on the command line: a code, what is wrong, and what to do.

# %%
try:
    geo_ray.simulate(config, {"strategy.intervall": 8})
except geo_ray.GeoRayError as error:
    print(error)
