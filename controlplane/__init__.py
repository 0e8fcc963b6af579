"""Headway's control plane: decides for every request whether, when and where it runs."""
