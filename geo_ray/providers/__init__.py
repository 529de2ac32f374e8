"""Machines of a cloud: listed, launched, ended; one file or folder per provider."""
