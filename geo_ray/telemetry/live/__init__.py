"""The live page of a run: served on the loopback interface to clients that present its token."""
