"""The base of Sokoban and the frozen lake: single boards, and batches of boards in NumPy.

A game consists of a `Physics` (the effect of a move on three cells), options and levels; see `game.BoardGame`.
`env.BoardEnv` plays one board, `vector.BoardVectorEnv` plays many. Both use the same `Physics`, so their rules agree.
"""
