"""Starts the processes of a run, such as vLLM servers and sandbox nodes: on this machine, or on the nodes of a cluster.

A launcher implements `envkit.protocols.Launcher`; `cluster.open_launcher` opens the one that ``placement.launcher``
names.
"""
