"""Records as message headers; what comes in is checked before it is used."""
