"""Upper bounds on the speed of CUDA kernels, read from their machine code without a GPU.

``rounds.py`` declares what a warp does in one round of a kernel's main loop. ``walk.py`` finds the cheapest way through
the loop that does so, ``cost.py`` counts what it needs of a multiprocessor, and ``bounds.py`` divides by what each GPU
of ``gpus.py`` has. ``record.py`` compares the bounds with the committed ones, ``bounds.json``.
"""
