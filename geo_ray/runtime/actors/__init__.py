"""The processes of a region as Ray actors, and what they carry out."""
