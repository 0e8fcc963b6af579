"""May a call enter, and when: a pure decision, an ordered queue, and money held in slices."""
