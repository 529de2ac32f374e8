"""Which strategy suits these links? Cell by cell."""

# %% [markdown]
# # Which strategy suits these links?
# The same workload over a slow network with several strategies; all simulated.

# %%
import geo_ray

workload = geo_ray.load_config(
    {
        "name": "slow",
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {"rows_per_shard": 256}, "batch_size": 16},
        "regions": [{"name": "us-east"}, {"name": "eu-west"}],
        "strategy": {"kind": "sma", "interval": 4},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": {"steps": 16, "eval_every": 8},
        "emulate": {"link": {"rate_mbps": 2, "delay_s": 0.1}, "step_s": 0.05},
    }
)

# %%
result = geo_ray.compare(
    workload,
    ["bsp", "sma:interval=8", "sma:interval=8:codec=int8"],
    seeds=1,
    rates=(1.0,),
    out="comparison",
)
result

# %% [markdown]
# Rows are sorted best first. `result.points()` has every evaluation of every run, for a plot.

# %%
for row in result.table().to_pylist():
    print(f"{row['label']:28} {row['seconds']:6.1f} s {row['wan_bytes'] / 1e6:6.2f} MB")
print(result.points().num_rows, "evaluations,", result.page_path.name)

# %% [markdown]
# The fastest one, once more, and watched: `on_event` is given every event as it happens.

# %%
fastest = min(result.rows, key=lambda row: row.seconds.median)
parts = dict(
    part.split("=") for part in fastest.label.split(":")[1:] if part.startswith("interval")
)
exchanges = []


def watch(event: geo_ray.Event) -> None:
    """Keep what went over the network."""
    if event.kind == "exchange":
        exchanges.append(event["bytes_sent"])


strategy = {"kind": fastest.label.split(":")[0], **{key: int(n) for key, n in parts.items()}}
run = geo_ray.simulate(workload, {"strategy": strategy}, on_event=watch)
print(run, len(exchanges), "exchanges")
