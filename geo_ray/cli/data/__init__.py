"""`geo-ray data`: one file per verb."""
