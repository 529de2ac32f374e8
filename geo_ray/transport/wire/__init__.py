"""The wire format: headers, frames, handshake and messages."""
