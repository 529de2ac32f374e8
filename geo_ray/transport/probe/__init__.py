"""Active measurement of links."""
