"""Board games: what Sokoban and the frozen lake share, one at a time and many in NumPy.

A game is a `Physics` (what a move does to three cells), options and levels; see `game.BoardGame`. `env.BoardEnv` and
`vector.BoardVectorEnv` read the same physics, so that they cannot differ.
"""
