"""How regions agree: one strategy per file, each a frozen configuration with a few pure methods."""
