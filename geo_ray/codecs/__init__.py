"""Codecs: how a payload is made small. One file per codec; `base` says what a codec is."""
