"""Datagrams between regions: sealed and paced; some of them get lost."""
