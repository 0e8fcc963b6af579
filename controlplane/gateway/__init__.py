"""The hot path: reads a call off the wire, asks the gate, relays an engine's answer, settles."""
