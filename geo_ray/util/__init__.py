"""Small tools without a subject of their own: files, threads, a log that does not flood."""
