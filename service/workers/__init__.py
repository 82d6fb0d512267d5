"""Worker processes of a front end: each answers one question at a time, and callers take turns."""
