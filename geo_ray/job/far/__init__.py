"""Runs whose directory is in a bucket: ``run.dir: s3://...``.

Whoever drives such a run writes to a directory of its own machine, and a mirror copies that to the
bucket every few seconds. Whoever looks at it has a copy of the bucket. Lease and requests lie in
the bucket only.
"""
