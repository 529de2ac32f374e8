"""How much is on its way at a time: window, streams, and what a link is seen to carry."""
