"""The same job on a virtual clock: the real state machines and gradients over a seeded network."""
