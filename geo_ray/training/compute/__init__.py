"""The worker's arithmetic: gradients, local steps, optimizers, noise."""
