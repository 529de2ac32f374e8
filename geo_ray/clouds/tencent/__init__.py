"""Tencent Cloud: prices, through its SDK."""
