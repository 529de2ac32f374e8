"""Network transport: reliable messages between regions, requests within one."""
