"""Telemetry of a run: event log, metrics, status, summary, report and live page."""
