"""What several codecs share: bytes, blocks, selections, error feedback."""
