"""Kernels in C++ for the CPU, compiled at the first start on a machine that has a compiler.

``build.py`` compiles and caches, ``library.py`` says what the functions take, ``kernels.py`` is the
``Ops`` that calls them. Nothing depends on them: without a compiler the torch path computes.

They are compiled here and not shipped, since what they gain comes from the very machine's vector
and tile instructions, and a plain C interface keeps that at seconds, with no headers needed.
"""
