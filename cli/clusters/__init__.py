"""Cluster documents that ship with Headway."""
