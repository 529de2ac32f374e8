"""``python -m geo_ray.providers.notices``: what a machine's cloud says of the machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from geo_ray.errors import GeoRayError
from geo_ray.providers.notices.open import CLOUDS, open_notices


def main() -> int:
    """Print the machine's name, or its notice."""
    parser = argparse.ArgumentParser(prog="geo_ray.providers.notices")
    parser.add_argument("--cloud", choices=CLOUDS, required=True)
    parser.add_argument("--url", help="of the metadata service, in place of the cloud's")
    parser.add_argument("--file", type=Path, help="of the local cloud's notice")
    parser.add_argument("--machine-id", action="store_true", help="print the machine's name")
    asked = parser.parse_args()
    try:
        reader = open_notices(asked.cloud, asked.url, asked.file)
        found = reader.machine_id() if asked.machine_id else reader.read()
    except GeoRayError as error:
        sys.stderr.write(f"error {error}\n")
        return error.exit_code
    sys.stdout.write(f"{found or 'no notice'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
