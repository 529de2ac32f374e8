"""Dashboards for Grafana and alerts for Prometheus, of the metrics that a run serves."""
