"""Where jobs and clusters come from: published traces, and made-up loads."""
