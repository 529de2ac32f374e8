"""Machines of Tencent Cloud."""
