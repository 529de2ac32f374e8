"""What bytes on a socket mean: frames, headers, messages, the handshake."""
