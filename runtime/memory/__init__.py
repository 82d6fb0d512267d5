"""Pools of the device's memory: who owns what. No torch, clock, thread or logger."""
