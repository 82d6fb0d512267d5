"""The engine's loop and what it talks to: front ends, the log, figures."""
