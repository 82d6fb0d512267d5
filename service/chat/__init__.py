"""Chats: a checkpoint's template makes a prompt of messages, in processes that can reach nothing."""
