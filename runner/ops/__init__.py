"""The decoder's arithmetic, one implementation per kind of machine behind one interface.

``interface.py`` says what an implementation provides. ``torch_ops.py`` computes on any CPU in plain
torch; ``native/`` does parts of the same in C++ where a compiler was found. ``model.py`` strings
the calls together and knows nothing of what is behind them.
"""
