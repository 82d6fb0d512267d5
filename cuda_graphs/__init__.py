"""Devices that run launches: streams, marks, captured graphs, staging and result rings.

This package knows launches and buffers. It knows no requests.
"""
