"""TLS between regions, certificates, their storage, and secrets of processes."""
