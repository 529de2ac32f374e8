"""The live page of a run: served on this machine alone, to who has its token."""
