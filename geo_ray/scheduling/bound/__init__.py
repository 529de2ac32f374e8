"""What no policy can exceed, even one that knows the future."""
