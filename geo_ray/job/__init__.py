"""From an experiment to the objects that carry it out; shared by runtime and simulator."""
