"""`headway simulate`: a virtual-time world in which the live decision code plays against baselines."""
