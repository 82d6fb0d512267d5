"""Chats: a checkpoint's template renders messages to a prompt, in confined processes."""
