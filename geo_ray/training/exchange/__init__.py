"""The two ends of an exchange: payloads are coded here and decoded there."""
