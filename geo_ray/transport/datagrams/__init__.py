"""Datagrams between regions: sealed, paced, lost now and then."""
