"""An engine without a GPU: vLLM's HTTP surface and metric names over a batching loop timed by a
roofline model.

It holds no weights and computes no attention. Scheduling, KV blocks, prefix cache and clock are
modelled; the text is a deterministic function of the prompt.
"""
