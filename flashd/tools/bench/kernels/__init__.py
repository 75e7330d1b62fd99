"""``flashd bench kernels``: every native verb beside the machine's memory, and beside torch.

``options`` says what to measure, ``cases`` and ``ffn`` how a verb is called, ``memory`` where the cold
weights lie, ``run`` lets everybody take turns, ``report`` is the result.
"""
