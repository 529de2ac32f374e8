"""TLS, certificates and where they are kept."""
