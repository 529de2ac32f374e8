"""geo_ray: train one PyTorch model on data that must stay in several cloud regions."""

__version__ = "0.1.0"
