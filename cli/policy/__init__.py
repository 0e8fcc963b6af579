"""`headway policy`: bundles from a folder to every replica, and back."""
