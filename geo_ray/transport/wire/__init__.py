"""The format of bytes on a socket: frames, headers, messages, the handshake."""
