"""Export of events to other programs: OpenTelemetry, TensorBoard, MLflow, Weights & Biases.

A failing exporter never stops the run.
"""
