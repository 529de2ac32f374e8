"""One workload, several ways to synchronise, one table: see `geo-ray compare`."""
