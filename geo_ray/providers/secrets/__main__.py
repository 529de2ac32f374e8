"""``python -m geo_ray.providers.secrets``: prints a secret, for the first minute of a machine."""

from __future__ import annotations

import argparse
import sys

from geo_ray.errors import GeoRayError
from geo_ray.providers.secrets.open import KINDS, open_secrets


def main() -> int:
    """Print the secret; errors go to the standard error output, without its value."""
    parser = argparse.ArgumentParser(prog="geo_ray.providers.secrets")
    parser.add_argument("--store", choices=KINDS, required=True)
    parser.add_argument("--region", required=True, help="of a file store: its directory")
    parser.add_argument("--endpoint", help="address in place of the cloud's")
    parser.add_argument("name")
    asked = parser.parse_args()
    try:
        sys.stdout.write(open_secrets(asked.store, asked.region, asked.endpoint).get(asked.name))
    except GeoRayError as error:
        sys.stderr.write(f"error {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
