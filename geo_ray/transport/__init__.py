"""Sockets: between regions (`endpoint`) and inside a region (`lan`)."""
