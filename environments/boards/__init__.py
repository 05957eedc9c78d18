"""The base of Sokoban and the frozen lake: single boards, and batches of boards in NumPy.

A game consists of a `Physics` (the effect of a move on three cells), options and levels; see `game.BoardGame`.
`env.BoardEnv` and `vector.BoardVectorEnv` play by the same `Physics`, so their rules cannot differ.
"""
